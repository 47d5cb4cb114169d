"""The spec of a ModelService."""

from __future__ import annotations

from millrace_operator.schema import pools
from millrace_operator.schema.fields import (
    Schema,
    boolean,
    choice,
    decimal,
    integer,
    keyed_list,
    pod_template,
    record,
    rule,
    secret_key,
    text,
)

_OBJECTIVES = {
    "ttftSeconds": "Time to first token, in seconds as a decimal number in quotes.",
    "tbtMilliseconds": "Time between two tokens, in milliseconds.",
}


def _model() -> Schema:
    return record(
        "The served model.",
        {
            "name": text("Model name for clients.", minLength=1),
            "uri": text(
                "A hub id (org/name), or an absolute path inside the containers, such as "
                "/models/llama if weights are mounted.",
                longest=1024,
                minLength=1,
            ),
            "revision": text(
                "Any name of the weights' version. A change replaces prefill and decode instances "
                "in pairs, so that no instance gets KV of other weights.",
                longest=63,
                default="",
            ),
            "maxContextTokens": integer(
                "Longest context. 0: the model's own.", 0, 67_108_864, default=0
            ),
        },
        required=("name", "uri"),
        rules=(
            rule(
                "self.uri.startsWith('/') || "
                "self.uri.matches('^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+$')",
                "model.uri is a hub id (org/name) or an absolute path",
            ),
        ),
    )


def _weights() -> Schema:
    read_only = boolean("Whether the claim is attached read-only.", default=True)
    sources = {
        "persistentVolumeClaim": record(
            "A claim that all nodes can attach at the same time (ReadOnlyMany or ReadWriteMany).",
            {
                "claimName": text("Name of the claim, in the same namespace.", minLength=1),
                "subPath": text("Mounted folder of the volume.", longest=1024, default=""),
                "readOnly": read_only,
            },
            required=("claimName",),
        ),
        "hostPath": record(
            "A folder on every node. The pod security level `restricted` forbids it.",
            {"path": text("Absolute path on the node.", longest=1024, pattern="^/")},
            required=("path",),
        ),
        "image": record(
            "An OCI image or artifact whose files are the weights.",
            {
                "reference": text("Image reference.", longest=1024, minLength=1),
                "pullPolicy": choice(
                    "When the image is pulled.",
                    "Always",
                    "IfNotPresent",
                    "Never",
                    default="IfNotPresent",
                ),
            },
            required=("reference",),
        ),
        "hub": record(
            "Downloaded from the model hub by every instance when it starts.",
            {
                "secretRef": secret_key("The hub's access token.", "token"),
                "cache": record(
                    "Volume for the download, which lasts as long as the pod.",
                    {
                        "sizeLimit": text(
                            "Largest size, as a quantity such as 200Gi.",
                            longest=32,
                            pattern=r"^[0-9]+(\.[0-9]+)?([EPTGMk]i?)?$",
                        )
                    },
                ),
            },
        ),
    }
    given = ", ".join(f"has(self.{name})" for name in sources)
    return record(
        "Source of the weights, mounted read-only at /models. Without it, model.uri is a path "
        "inside the image, or a hub id.",
        sources,
        rules=(
            rule(
                f"[{given}].filter(one, one).size() <= 1",
                "weights takes one of " + ", ".join(sources),
            ),
        ),
    )


def _slo() -> dict[str, Schema]:
    return {
        "slo": record(
            "Objectives of requests that give neither a class nor objectives.",
            {
                "ttftSeconds": decimal(_OBJECTIVES["ttftSeconds"], default="10"),
                "tbtMilliseconds": integer(
                    _OBJECTIVES["tbtMilliseconds"], 1, 1_000_000, default=100
                ),
            },
            default={},
        ),
        "sloClasses": keyed_list(
            "Classes that clients choose by the header x-millrace-class.",
            "name",
            32,
            record(
                "One class; slo gives the objectives that it leaves out.",
                {
                    "name": text("Name of the class.", longest=63, minLength=1),
                    "ttftSeconds": decimal(_OBJECTIVES["ttftSeconds"]),
                    "tbtMilliseconds": integer(_OBJECTIVES["tbtMilliseconds"], 1, 1_000_000),
                },
                required=("name",),
            ),
        ),
    }


def _scheduling() -> Schema:
    return record(
        "How the scheduler orders and places requests.",
        {
            "policy": choice(
                "Order of requests.",
                *("fcfs", "edf", "d_edf", "s_edf", "lrs", "lars", "lars_deadline", "millrace"),
                default="millrace",
            ),
            "preemption": choice(
                "Where a running prefill yields to a prefill that precedes it.",
                *("none", "chunk", "layer", "operator"),
                default="operator",
            ),
            "planner": choice(
                "Placement of prefill work on instances and SP groups; auto: cdsp if times of SP "
                "groups are known, else least_queue.",
                *("auto", "least_queue", "fixed_sp", "single_chunk", "esp", "cdsp"),
                default="auto",
            ),
            "maxSpDegree": integer(
                "Most instances of a group that the planner fixed_sp forms.",
                1,
                128,
                default=8,
            ),
        },
        default={},
    )


def _gateway() -> Schema:
    return record(
        "The REST gateway.",
        {
            "replicas": integer("Gateway pods.", 1, 100, default=2),
            "port": integer("Port of the gateway's Service.", 1, 65535, default=80),
            "adminTokenSecretRef": secret_key(
                "Bearer token of /admin. Without it, /admin answers only inside the pod.", "token"
            ),
            "parking": record(
                "Requests that wait while no instance can serve them.",
                {
                    "timeoutSeconds": integer(
                        "Longest wait before a request gets 503, s. 0: no wait.",
                        0,
                        86400,
                        default=300,
                    ),
                    "maxRequests": integer(
                        "Most requests that wait at one gateway pod.", 1, 100_000, default=1024
                    ),
                },
                default={},
            ),
            "template": pod_template("the gateway"),
        },
        default={},
    )


def _rules() -> tuple[Schema, ...]:
    return (
        rule("self.model.name == oldSelf.model.name", "model.name is immutable"),
        rule(
            "!has(self.kvp) || self.model.maxContextTokens <= "
            "self.kvp.tokensPerWorker * self.kvp.maxWorkersPerRequest",
            "kvp cannot hold maxContextTokens: raise tokensPerWorker or maxWorkersPerRequest",
        ),
        rule(
            "has(self.prefill) == (self.decode.role == 'decode')",
            "decode.role decode needs prefill; role mixed computes prompts and allows no prefill",
        ),
        rule(
            "!has(self.prefill) || self.prefill.autoscaling.scaleToZero.enabled == "
            "self.decode.autoscaling.scaleToZero.enabled",
            "prefill and decode must both scale to zero, or neither",
        ),
        rule(
            "!self.decode.autoscaling.scaleToZero.enabled || "
            "self.gateway.parking.timeoutSeconds > 0",
            "scaleToZero needs gateway.parking.timeoutSeconds above 0",
        ),
    )


def service_spec() -> Schema:
    return record(
        "The wanted state.",
        {
            "model": _model(),
            "weights": _weights(),
            **_slo(),
            "scheduling": _scheduling(),
            "settings": {
                "type": "object",
                "description": (
                    "Further settings of all services, as in docs/reference/configuration.md: "
                    "`section.field: value`."
                ),
                "additionalProperties": text("The value, as text.", longest=1024),
                "maxProperties": 64,
            },
            "redis": record(
                "The Redis server that keeps request state. Default: the server that the chart set "
                "up for the operator.",
                {"secretRef": secret_key("URL of the server, redis:// or rediss://.", "url")},
                required=("secretRef",),
            ),
            "tls": record(
                "Mutual TLS between the services. Certificates carry the DNS name "
                "millrace.internal.",
                {
                    "secretName": text(
                        "Secret with the keys ca.crt, tls.crt and tls.key.", minLength=1
                    )
                },
                required=("secretName",),
            ),
            "gateway": _gateway(),
            "scheduler": record("The scheduler.", {"template": pod_template("the scheduler")}),
            "prefill": pools.section(pools.PREFILL),
            "decode": pools.section(pools.DECODE),
            "kvp": pools.section(pools.KVP),
            "paused": boolean("True: the operator changes nothing.", default=False),
        },
        required=("model", "decode"),
        rules=_rules(),
    )
