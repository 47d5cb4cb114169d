"""The spec of a pool: on its own, and as a section of a ModelService."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """Defaults of scaleUp or scaleDown; `tolerance` is None for a pool without a band."""

    window_s: int
    max_step: int
    period_s: int
    tolerance: int | None

    def schema(self, way: str) -> Schema:
        fields = {
            "stabilizationWindowSeconds": integer(
                f"Time for which the signals must agree before the pool is scaled {way}, s.",
                0,
                3600,
                default=self.window_s,
            ),
            "maxStep": integer(
                f"Most instances by which the pool is scaled {way} within periodSeconds.",
                1,
                64,
                default=self.max_step,
            ),
            "periodSeconds": integer("Period of maxStep, s.", 1, 3600, default=self.period_s),
        }
        if self.tolerance is not None:
            fields["tolerancePercent"] = integer(
                f"Deviation from its target up to which a signal does not scale the pool {way}, %.",
                0,
                50,
                default=self.tolerance,
            )
        return record(f"Limits for scaling the pool {way}.", fields, default={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The properties in which the kinds of pools differ."""

    kind: str
    plural: str
    short: str
    role: str
    doc: str
    limits: tuple[int, int]  # default minReplicas and maxReplicas
    zero: bool  # whether it scales to zero when idle, by default
    up: Direction
    down: Direction
    targets: dict[str, str]  # default target by signal
    target_doc: str = ""
    mixed_targets: dict[str, str] = field(default_factory=dict)  # more signals of role mixed


SLOWLY = Direction(window_s=300, max_step=1, period_s=60, tolerance=20)

PREFILL = Kind(
    kind="PrefillGroup",
    plural="prefillgroups",
    short="pg",
    role="prefill",
    doc="Prefill instances of one model; sequence-parallel groups consist of them.",
    limits=(1, 8),
    zero=False,
    up=Direction(window_s=0, max_step=2, period_s=15, tolerance=10),
    down=SLOWLY,
    targets={"backlogSeconds": "4", "utilization": "0.8", "ttftSloRatio": "0.8"},
    target_doc=(
        "backlogSeconds: predicted seconds of waiting and running prefill, per instance. "
        "utilization: predicted seconds of prefill that arrive per second, per instance. "
        "ttftSloRatio: time to first token over its objective, of the worst class."
    ),
)
DECODE = Kind(
    kind="DecodePool",
    plural="decodepools",
    short="dp",
    role="decode",
    doc="Decode instances of one model, or mixed instances, which also compute prompts.",
    limits=(1, 16),
    zero=False,
    up=Direction(window_s=15, max_step=4, period_s=15, tolerance=10),
    down=SLOWLY,
    targets={"kvUtilization": "0.8", "tbtSloRatio": "0.9"},
    target_doc=(
        "kvUtilization: share of KV slots in use. tbtSloRatio: time between tokens over its "
        "objective, of the worst class. Role mixed also has the signals of prefill. "
        + PREFILL.target_doc
    ),
    mixed_targets=PREFILL.targets,
)
KVP = Kind(
    kind="KVPWorkerPool",
    plural="kvpworkerpools",
    short="kvp",
    role="kvp",
    doc="Workers that hold shards of the KV cache of long contexts.",
    limits=(0, 32),
    zero=True,
    up=Direction(window_s=0, max_step=4, period_s=15, tolerance=None),
    down=Direction(window_s=600, max_step=2, period_s=60, tolerance=None),
    targets={},
)
KINDS = (PREFILL, DECODE, KVP)

#: The possible roles of a DecodePool's instances.
DECODE_ROLES = ("decode", "mixed")


def _metrics(kind: Kind) -> Schema:
    names = [*kind.targets, *kind.mixed_targets]
    item = record(
        "One signal and its target.",
        {
            "name": {"type": "string", "description": kind.target_doc, "enum": names},
            "target": decimal("Target value per instance, as a decimal number in quotes."),
        },
        required=("name", "target"),
        rules=(
            rule(
                "self.name == 'backlogSeconds' ? double(self.target) >= 0.001 : "
                "double(self.target) >= 0.05 && double(self.target) <= 1.0",
                "target is between 0.05 and 1, that of backlogSeconds at least 0.001",
            ),
        ),
    )
    doc = "Signals that scale the pool; the signal that asks for the most instances counts."
    if kind.mixed_targets:  # the operator knows the default, which depends on the role
        doc += (
            f" Default: {_listed(kind.targets)}; of role mixed also {_listed(kind.mixed_targets)}."
        )
        return keyed_list(doc, "name", len(names), item, minItems=1)
    default = [{"name": name, "target": target} for name, target in kind.targets.items()]
    return keyed_list(doc, "name", len(names), item, minItems=1, default=default)


def _listed(targets: dict[str, str]) -> str:
    return ", ".join(f"{name} {target}" for name, target in targets.items())


def _autoscaling(kind: Kind) -> Schema:
    least, most = kind.limits
    fields = {
        "mode": choice(
            "Internal: the operator sets the pool's replicas. External: an HPA, KEDA or a person "
            "sets them through the scale subresource. Off: a person sets them. In External and Off "
            "the operator only writes a recommendation to the status.",
            "Internal",
            "External",
            "Off",
            default="Internal",
        ),
        "minReplicas": integer("Smallest number of instances.", 0, 1000, default=least),
        "maxReplicas": integer("Largest number of instances.", 1, 1000, default=most),
        "intervalSeconds": integer(
            "Time between two readings of the signals, s.", 1, 300, default=5
        ),
        "metricsStaleSeconds": integer(
            "Age above which signals do not scale, s.", 5, 600, default=30
        ),
        "scaleUp": kind.up.schema("up"),
        "scaleDown": kind.down.schema("down"),
        "scaleToZero": record(
            "Scaling of an idle pool to zero instances.",
            {
                "enabled": boolean(
                    "True: an idle pool goes to zero; the next request waits at the gateway and "
                    "starts it.",
                    default=kind.zero,
                ),
                "idleSeconds": integer(
                    "Time without a request before the pool goes to zero, s.",
                    30,
                    86400,
                    default=600,
                ),
            },
            default={},
        ),
    }
    if kind.targets:
        fields["metrics"] = _metrics(kind)
    return record(
        "The number of instances of the pool.",
        fields,
        # Spelt out as far as the rules below read it.
        default={
            "minReplicas": least,
            "maxReplicas": most,
            "scaleToZero": {"enabled": kind.zero},
        },
        rules=(
            rule("self.minReplicas <= self.maxReplicas", "minReplicas must be <= maxReplicas"),
            rule(
                "self.minReplicas > 0 || self.scaleToZero.enabled",
                "minReplicas 0 needs scaleToZero.enabled",
            ),
        ),
    )


def _compute() -> dict[str, Schema]:
    """Returns the fields for compute, of the pools that run the model."""
    return {
        "tensorParallel": {
            "type": "integer",
            "description": "Ranks that share each layer. Above 1 on CPUs only: gpus must be 0.",
            "enum": [1, 2, 4, 8],
            "default": 1,
        },
        "stages": integer(
            "Pipeline stages of an instance, each with consecutive layers. Above 1 on CPUs only: "
            "gpus must be 0.",
            1,
            64,
            default=1,
        ),
    }


def _role() -> Schema:
    return choice(
        "Role of the instances. decode: they generate tokens; prefill instances compute the "
        "prompts. mixed: they also compute the prompts, in the same batches. Immutable.",
        *DECODE_ROLES,
        default="decode",
    )


def _contexts() -> dict[str, Schema]:
    """Returns the fields that size a pool of KVP workers."""
    return {
        "tokensPerWorker": integer(
            "Most tokens of one context at a worker; a longer context is split over workers.",
            1024,
            16_777_216,
            default=262_144,
        ),
        "workerCapacityTokens": integer(
            "Tokens of all contexts that fit a worker's memory. 0: tokensPerWorker.",
            0,
            1_073_741_824,
            default=0,
        ),
        "maxWorkersPerRequest": integer(
            "Most workers over which one context is spread.", 1, 128, default=16
        ),
        "warmSpares": integer("Idle workers that are kept ready.", 0, 64, default=1),
        "growthLeadSeconds": integer(
            "Workers are started for the contexts' lengths after this time, s; set it to about the "
            "time that a worker takes to start.",
            0,
            600,
            default=30,
        ),
    }


def fields(kind: Kind) -> dict[str, Schema]:
    """Returns the fields that a pool and its section of a ModelService share."""
    own: dict[str, Schema] = _contexts() if kind is KVP else _compute()
    if kind is DECODE:
        own["role"] = _role()
    if kind is PREFILL:
        own["topologyKey"] = text(
            "Node label of the domain (node, rack) in which instances are placed together if "
            "possible, so that SP groups exchange keys and values over fast links.",
            default="kubernetes.io/hostname",
        )
    return {
        **own,
        "gpuResource": text(
            "Extended resource that an instance requests.",
            minLength=1,
            default="nvidia.com/gpu",
        ),
        "gpus": integer(
            "Units of gpuResource per instance. 0: it computes on CPUs. Default: "
            + ("1." if kind is KVP else "tensorParallel times stages."),
            0,
            64,
        ),
        "autoscaling": _autoscaling(kind),
        "drain": record(
            "How an instance leaves the pool: it gets no new work, ends its requests, and goes.",
            {
                "timeoutSeconds": integer("Time to end its requests, s.", 0, 86400, default=600),
                "onTimeout": choice(
                    "Action after that time. Migrate: requests are migrated to other instances. "
                    "Abort: requests end with an error. Wait: the instance stays until they end.",
                    "Migrate",
                    "Abort",
                    "Wait",
                    default="Migrate",
                ),
            },
            default={},
        ),
        "rollout": record(
            "How instances are replaced when their template changes.",
            {
                "maxSurge": integer(
                    "1: an extra instance starts before an old instance leaves, so that no "
                    "capacity is lost. 0: an old instance leaves first; needs no spare GPU.",
                    0,
                    1,
                    default=1,
                ),
            },
            default={},
        ),
        "template": pod_template(f"the {kind.role} instances"),
    }


def rules(kind: Kind) -> tuple[Schema, ...]:
    """Returns the rules over the fields above."""
    if kind is KVP:
        return (
            rule(
                "self.warmSpares <= self.autoscaling.maxReplicas",
                "warmSpares must be <= autoscaling.maxReplicas",
            ),
            rule(
                "self.maxWorkersPerRequest <= self.autoscaling.maxReplicas",
                "maxWorkersPerRequest must be <= autoscaling.maxReplicas",
            ),
        )
    no_gpus = "(has(self.gpus) && self.gpus == 0)"
    return (
        *(_role_rules() if kind is DECODE else ()),
        rule(f"self.stages == 1 || {no_gpus}", "stages above 1 need gpus 0: they run on CPUs only"),
        rule(
            f"self.tensorParallel == 1 || {no_gpus}",
            "tensorParallel above 1 needs gpus 0: on GPUs only rank 0 could send its KV",
        ),
    )


def _role_rules() -> tuple[Schema, ...]:
    own = ", ".join(f"'{name}'" for name in DECODE.targets)
    *most, last = DECODE.mixed_targets
    return (
        rule("self.role == oldSelf.role", "role is immutable"),
        rule(
            "self.role == 'mixed' || !has(self.autoscaling.metrics) || "
            f"self.autoscaling.metrics.all(metric, metric.name in [{own}])",
            f"{', '.join(most)} and {last} are signals of role mixed",
        ),
    )


def section(kind: Kind) -> Schema:
    """Makes the pool as a section of a ModelService."""
    initial = integer(
        "Instances at the start; later kubectl scale, an HPA or autoscaling sets the number in "
        f"the {kind.kind}. Default: autoscaling.minReplicas, at least 1.",
        0,
        1000,
    )
    return record(kind.doc, {"replicas": initial, **fields(kind)}, rules=rules(kind))


def pool_spec(kind: Kind) -> Schema:
    """Makes the spec of a pool."""
    own: dict[str, Any] = {
        "serviceRef": record(
            "The ModelService that the pool belongs to.",
            {"name": text("Its name, in the same namespace.", longest=63, minLength=1)},
            required=("name",),
        ),
        "replicas": integer(
            "Instances of the pool; kubectl scale and an HPA set this.", 0, 1000, default=1
        ),
    }
    return record(
        "The wanted state.",
        {**own, **fields(kind)},
        required=("serviceRef",),
        rules=(
            rule("self.serviceRef == oldSelf.serviceRef", "serviceRef is immutable"),
            *rules(kind),
        ),
    )
