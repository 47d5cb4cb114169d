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
                    "name": text("Name of the variable.", minLength=1),
                    "value": text("Value of the variable.", longest=32768),
                    "valueFrom": opaque("Source of the value."),
                },
                required=("name",),
            ),
        ),
        "nodeSelector": texts("Labels of the nodes on which pods may run."),
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
                    "Pull policy of the images.",
                    *("Always", "IfNotPresent", "Never"),
                    default="IfNotPresent",
                ),
                "pullSecrets": items("Secrets for pulling images."),
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
                "enabled": boolean("Whether this release runs the operator.", default=True),
                "replicas": integer("Operator pods; only the leader acts.", 0, 5),
                "watchNamespaces": items(
                    "Namespaces that the operator manages; none: all.",
                    text("A namespace.", minLength=1),
                ),
                "upgradeCrds": boolean(
                    "Whether the operator installs its CRDs at start.", default=True
                ),
                "logLevel": choice(
                    "Log level.", *("debug", "info", "warning", "error"), default="info"
                ),
                **placement(),
            },
        ),
        "serviceAccount": record(
            "The operator's ServiceAccount.",
            {
                "create": boolean("Whether the chart creates the account.", default=True),
                "name": text("Name of the account."),
                "annotations": texts("Annotations of the account."),
            },
        ),
    }


def _redis() -> dict[str, Schema]:
    where = placement()
    del where["env"]
    persistence = record(
        "The volume of the append-only file.",
        {
            "enabled": boolean("Whether the data outlives the pod.", default=True),
            "size": quantity("Size of the volume."),
            "storageClass": text("StorageClass; empty: the cluster's default; -: none."),
            "whenDeleted": choice(
                "Whether the volume is kept when Redis is deleted.",
                "Delete",
                "Retain",
                default="Delete",
            ),
        },
    )
    return {
        "redis": record(
            "The chart's own Redis.",
            {
                "enabled": boolean("Whether the chart runs Redis.", default=True),
                "image": text(
                    "Image with a version.", longest=1024, pattern="^.+(:[^:/]+|@sha256:.+)$"
                ),
                "existingSecret": text("Secret with the keys password and url."),
                "maxmemory": {
                    "type": "string",
                    "description": "Largest memory, such as 3gb; empty: no limit.",
                    "pattern": "^([0-9]+([kmg]b?)?)?$",
                },
                "config": text("Further lines of redis.conf.", longest=65536),
                "persistence": persistence,
                **where,
            },
        ),
        "externalRedis": record(
            "An existing Redis server.",
            {
                "url": text("URL of the server.", longest=2048, pattern="^(rediss?://.+)?$"),
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
                "enabled": boolean("Whether the chart creates an Ingress.", default=False),
                "className": text("Name of the IngressClass."),
                "annotations": texts("Annotations of the Ingress."),
                "hosts": items("Host names; none: any.", text("A host name.", minLength=1)),
                "tls": items("Certificates, as of an Ingress."),
            },
        ),
        "httpRoute": record(
            "An HTTPRoute (Gateway API) to the gateway.",
            {
                "enabled": boolean("Whether the chart creates an HTTPRoute.", default=False),
                "parentRefs": items("Gateways of the route."),
                "hostnames": items("Host names.", text("A host name.", minLength=1)),
                "timeouts": record(
                    "Time-outs; 0s: none.",
                    {
                        "request": {**duration, "description": "Time-out of a whole answer."},
                        "backendRequest": {**duration, "description": "Time-out of one attempt."},
                    },
                ),
                "annotations": texts("Annotations of the HTTPRoute."),
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
                        "enabled": boolean(
                            "Whether cert-manager issues the certificates.", default=False
                        ),
                        "issuerRef": record(
                            "The issuer; none: the chart creates its own CA.",
                            {
                                "name": text("Name of the issuer."),
                                "kind": text("Issuer or ClusterIssuer."),
                                "group": text("API group of the issuer."),
                            },
                        ),
                        "duration": {**hours, "description": "Lifetime of a certificate."},
                        "renewBefore": {**hours, "description": "Time of renewal before the end."},
                    },
                ),
            },
        ),
        "networkPolicy": record(
            "Network connections of the release's pods.",
            {
                "enabled": boolean("Whether the chart creates NetworkPolicies.", default=True),
                "clients": {**peers, "description": "Peers that may send requests; none: all."},
                "prometheus": {**peers, "description": "Peers that may read metrics."},
                "dns": record("The DNS servers.", {"peers": peers, "ports": ports}),
                "apiServer": record(
                    "The API server; no peers: any address.", {"peers": peers, "ports": ports}
                ),
                "hub": {
                    "description": "HTTPS to all addresses; auto: for pods that fetch models.",
                    "enum": ["auto", True, False],
                },
                "extraEgress": items("Egress rules of the service's pods."),
                "extraRedisClients": {**peers, "description": "Other peers that may use Redis."},
            },
        ),
        "priorityClass": record(
            "A PriorityClass of the service's pods.",
            {
                "create": boolean("Whether the chart creates a PriorityClass.", default=False),
                "value": integer("Value of the class.", -1_000_000_000, 1_000_000_000),
                "preemptionPolicy": choice(
                    "Whether its pods preempt other pods.",
                    *("PreemptLowerPriority", "Never"),
                    default="PreemptLowerPriority",
                ),
            },
        ),
    }


def _monitoring() -> Schema:
    enabled = boolean("Whether the chart creates these objects.", default=False)
    labels = texts("Labels of these objects.")
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
                        "description": "The alert fires below this share of first tokens in time.",
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
