"""The chart's values for the platform: images, operator, Redis, ingress, security."""

from __future__ import annotations

from millrace_operator.schema.fields import Schema, boolean, choice, integer, record, text


def opaque(doc: str) -> Schema:
    """Makes an object of Kubernetes itself, which the API server checks."""
    return {"type": "object", "description": doc}


def items(doc: str, item: Schema | None = None) -> Schema:
    return {"type": "array", "description": doc, "items": item or {"type": "object"}}


def texts(doc: str) -> Schema:
    return {"type": "object", "description": doc, "additionalProperties": {"type": "string"}}


def port(doc: str) -> Schema:
    return integer(doc, 1, 65535)


QUANTITY = {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?([EPTGMk]i?|m)?$"}


def quantity(doc: str) -> Schema:
    return {**QUANTITY, "description": doc}


def placement() -> dict[str, Schema]:
    return {
        "resources": record(
            "Requests and limits of the container.",
            {
                which: {
                    "type": "object",
                    "description": "Amount by resource.",
                    "additionalProperties": QUANTITY,
                }
                for which in ("requests", "limits")
            },
        ),
        "env": items(
            "Environment variables of the container.",
            record(
                "One variable, as of a container.",
                {
                    "name": text("Its name.", minLength=1),
                    "value": text("Its value.", longest=32768),
                    "valueFrom": opaque("Where its value comes from."),
                },
                required=("name",),
            ),
        ),
        "nodeSelector": texts("Labels of the nodes that pods may run on."),
        "affinity": opaque("Affinity, as of a pod."),
        "tolerations": items("Tolerations, as of a pod."),
        "priorityClassName": text("PriorityClass of the pods."),
        "podAnnotations": texts("Annotations of the pods."),
    }


def _images() -> dict[str, Schema]:
    roles = ("proxy", "scheduler", "prefill", "decode", "kvp", "operator")
    return {
        "image": record(
            "Images of the services: REGISTRY/millrace-ROLE:TAG.",
            {
                "registry": text("Registry and folder."),
                "tag": text("Tag; empty: the chart's appVersion.", longest=128),
                "pullPolicy": choice(
                    "When images are pulled.",
                    *("Always", "IfNotPresent", "Never"),
                    default="IfNotPresent",
                ),
                "pullSecrets": items("Secrets to pull images with."),
            },
        ),
        "images": record(
            "Whole image references, by role.",
            {role: text(f"Image of {role}.", longest=1024) for role in roles},
        ),
    }


def _operator() -> dict[str, Schema]:
    return {
        "operator": record(
            "The operator.",
            {
                "enabled": boolean("Whether this release runs it.", default=True),
                "replicas": integer("Operators, of which one acts.", 0, 5),
                "watchNamespaces": items(
                    "Namespaces that it manages; none: all.", text("A namespace.", minLength=1)
                ),
                "upgradeCrds": boolean("Whether it brings its CRDs at start.", default=True),
                "logLevel": choice(
                    "What it logs.", *("debug", "info", "warning", "error"), default="info"
                ),
                **placement(),
            },
        ),
        "serviceAccount": record(
            "The operator's account.",
            {
                "create": boolean("Whether the chart makes it.", default=True),
                "name": text("Its name."),
                "annotations": texts("Its annotations."),
            },
        ),
    }


def _redis() -> dict[str, Schema]:
    where = placement()
    del where["env"]
    persistence = record(
        "The volume of the append-only file.",
        {
            "enabled": boolean("Whether data outlives the pod.", default=True),
            "size": quantity("Size of the volume."),
            "storageClass": text("Its class; empty: the cluster's default; -: none."),
            "whenDeleted": choice(
                "What happens to it when Redis is deleted.", "Delete", "Retain", default="Delete"
            ),
        },
    )
    return {
        "redis": record(
            "The chart's own Redis.",
            {
                "enabled": boolean("Whether the chart brings Redis.", default=True),
                "image": text(
                    "Its image, with a version.", longest=1024, pattern="^.+(:[^:/]+|@sha256:.+)$"
                ),
                "existingSecret": text("Secret with the keys password and url."),
                "maxmemory": {
                    "type": "string",
                    "description": "Memory at most, such as 3gb; empty: no limit.",
                    "pattern": "^([0-9]+([kmg]b?)?)?$",
                },
                "config": text("Further lines of redis.conf.", longest=65536),
                "persistence": persistence,
                **where,
            },
        ),
        "externalRedis": record(
            "A Redis that is there already.",
            {
                "url": text("Its URL.", longest=2048, pattern="^(rediss?://.+)?$"),
                "existingSecret": text("Secret with the key url."),
            },
        ),
    }


def _ways_in() -> dict[str, Schema]:
    duration = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
    return {
        "ingress": record(
            "An Ingress to the gateway.",
            {
                "enabled": boolean("Whether there is one.", default=False),
                "className": text("Its IngressClass."),
                "annotations": texts("Its annotations."),
                "hosts": items("Host names; none: any.", text("A host name.", minLength=1)),
                "tls": items("Certificates, as of an Ingress."),
            },
        ),
        "httpRoute": record(
            "An HTTPRoute (Gateway API) to the gateway.",
            {
                "enabled": boolean("Whether there is one.", default=False),
                "parentRefs": items("The Gateways that it hangs on."),
                "hostnames": items("Host names.", text("A host name.", minLength=1)),
                "timeouts": record(
                    "0s: none.",
                    {
                        "request": {**duration, "description": "For a whole answer."},
                        "backendRequest": {**duration, "description": "For one try of it."},
                    },
                ),
                "annotations": texts("Its annotations."),
            },
        ),
    }


def _security() -> dict[str, Schema]:
    peers = items("NetworkPolicy peers.")
    ports = items("Ports.", port("A port."))
    hours = {"type": "string", "pattern": "^([0-9]+(h|m|s))+$"}
    return {
        "tls": record(
            "TLS between the services.",
            {
                "existingSecret": text("Secret with ca.crt, tls.crt and tls.key."),
                "certManager": record(
                    "Certificates by cert-manager.",
                    {
                        "enabled": boolean("Whether it makes them.", default=False),
                        "issuerRef": record(
                            "The issuer; none: the chart makes an authority of its own.",
                            {
                                "name": text("Its name."),
                                "kind": text("Issuer or ClusterIssuer."),
                                "group": text("Its API group."),
                            },
                        ),
                        "duration": {**hours, "description": "Life of a certificate."},
                        "renewBefore": {**hours, "description": "Renewed so long before its end."},
                    },
                ),
            },
        ),
        "networkPolicy": record(
            "What the release's pods may talk to.",
            {
                "enabled": boolean("Whether there are policies.", default=True),
                "clients": {**peers, "description": "Who may send requests; none: anybody."},
                "prometheus": {**peers, "description": "Who may read metrics."},
                "dns": record("Who answers names.", {"peers": peers, "ports": ports}),
                "apiServer": record(
                    "The API server; no peers: any address.", {"peers": peers, "ports": ports}
                ),
                "hub": {
                    "description": "HTTPS to anywhere for what fetches models; auto: if one does.",
                    "enum": ["auto", True, False],
                },
                "extraEgress": items("Egress rules of the service's pods."),
                "extraRedisClients": {**peers, "description": "Further peers that use Redis."},
            },
        ),
        "priorityClass": record(
            "A PriorityClass of the service's pods.",
            {
                "create": boolean("Whether the chart makes one.", default=False),
                "value": integer("Its value.", -1_000_000_000, 1_000_000_000),
                "preemptionPolicy": choice(
                    "Whether its pods push out others.",
                    *("PreemptLowerPriority", "Never"),
                    default="PreemptLowerPriority",
                ),
            },
        ),
    }


def _monitoring() -> Schema:
    enabled = boolean("Whether the chart makes them.", default=False)
    labels = texts("Their labels.")
    ratio = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    return record(
        "Monitoring.",
        {
            "podMonitor": record(
                "PodMonitors of all pods.",
                {
                    "enabled": enabled,
                    "labels": labels,
                    "interval": {
                        "type": "string",
                        "description": "Time between two scrapes.",
                        "pattern": "^[0-9]+(ms|s|m)$",
                    },
                },
            ),
            "alerts": record(
                "A PrometheusRule.",
                {
                    "enabled": enabled,
                    "labels": labels,
                    "ttftAttainment": {
                        **ratio,
                        "description": "Share of first tokens in time, before the alert.",
                    },
                },
            ),
            "dashboards": record(
                "ConfigMaps with Grafana dashboards.", {"enabled": enabled, "labels": labels}
            ),
        },
    )


def platform() -> dict[str, Schema]:
    """Returns all values other than those of the ModelService."""
    return {
        **_images(),
        **_operator(),
        **_redis(),
        **_ways_in(),
        **_security(),
        "monitoring": _monitoring(),
    }
