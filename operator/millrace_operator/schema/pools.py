"""The specs of pools: on their own, and as sections of a ModelService."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from millrace_operator.schema.autoscaling import (
    DecodeAutoscaling,
    KvpAutoscaling,
    PrefillAutoscaling,
)
from millrace_operator.schema.record import (
    PodTemplate,
    Record,
    Schema,
    Text,
    doc,
    pod_template,
    rule,
    section,
)


def _gpus(default: str) -> Any:  # noqa: ANN401
    text = f"Units of gpuResource per instance. 0: it computes on CPUs. Default: {default}."
    return doc(text, None, ge=0, le=64)


def _initial(kind: str) -> Any:  # noqa: ANN401
    return doc(
        "Instances at the start; later kubectl scale, an HPA or autoscaling sets the number in "
        f"the {kind}. Default: autoscaling.minReplicas, at least 1.",
        None,
        ge=0,
        le=1000,
    )


class Drain(Record):
    """How an instance leaves the pool: it gets no new work, ends its requests, and goes."""

    timeout_seconds: int = doc("Time to end its requests, s.", 600, ge=0, le=86400)
    on_timeout: Literal["Migrate", "Abort", "Wait"] = doc(
        "Action after that time. Migrate: requests are migrated to other instances. "
        "Abort: requests end with an error. Wait: the instance stays until they end.",
        "Migrate",
    )


class RolloutSpec(Record):
    """How instances are replaced when their template changes."""

    max_surge: int = doc(
        "1: an extra instance starts before an old instance leaves, so that no "
        "capacity is lost. 0: an old instance leaves first; needs no spare GPU.",
        1,
        ge=0,
        le=1,
    )


class Instances(Record):
    """The fields that all pools have."""

    replicas: int | None = _initial("pool")
    gpu_resource: Text = doc(
        "Extended resource that an instance requests.", "nvidia.com/gpu", min_length=1
    )
    gpus: int | None = _gpus("tensorParallel times stages")
    drain: Drain = section()
    rollout: RolloutSpec = section()


class ModelInstances(Instances):
    """The fields that the pools that run the model have."""

    rules: ClassVar[tuple[Schema, ...]] = (
        rule(
            "!has(self.gpus) || self.gpus == 0 || self.gpus >= self.tensorParallel * self.stages",
            "gpus must be 0 or at least tensorParallel times stages: each rank of each stage needs "
            "a GPU",
        ),
        rule("self.stagePods == oldSelf.stagePods", "stagePods is immutable"),
        rule(
            "self.stagePods == 'Shared' || self.stages > 1",
            "stagePods is Own and stages is 1: an instance of one stage has one pod",
        ),
        rule(
            "self.stagePods == 'Shared' || !has(self.gpus) || self.gpus % self.stages == 0",
            "gpus must be divisible by stages where stagePods is Own: each pod gets the same "
            "number",
        ),
    )
    tensor_parallel: Literal[1, 2, 4, 8] = doc(
        "Ranks that share each layer, each on a GPU of its own unless gpus is 0.", 1
    )
    stages: int = doc(
        "Pipeline stages of an instance, each with consecutive layers. Their ranks are each on a "
        "GPU of its own unless gpus is 0.",
        1,
        ge=1,
        le=64,
    )
    stage_pods: Literal["Shared", "Own"] = doc(
        "Pods of an instance's stages. Shared: one pod has all stages. Own: each stage has a pod "
        "of its own, which may be on another node; the pods of an instance start, drain and are "
        "replaced together. Immutable.",
        "Shared",
    )


class Prefill(ModelInstances):
    """Prefill instances of one model; sequence-parallel groups consist of them."""

    role: ClassVar = "prefill"
    replicas: int | None = _initial("PrefillGroup")
    topology_key: Text = doc(
        "Node label of the domain (node, rack) in which instances are placed together if "
        "possible, so that SP groups exchange keys and values over fast links.",
        "kubernetes.io/hostname",
    )
    autoscaling: PrefillAutoscaling = section(**PrefillAutoscaling.spelt_out())
    template: PodTemplate | None = pod_template("the prefill instances")


class Decode(ModelInstances):
    """Decode instances of one model, or mixed instances, which also compute prompts."""

    rules: ClassVar[tuple[Schema, ...]] = (
        rule("self.role == oldSelf.role", "role is immutable"),
        rule(
            "self.role == 'mixed' || !has(self.autoscaling.metrics) || "
            "self.autoscaling.metrics.all(metric, metric.name in ['kvUtilization', 'tbtSloRatio'])",
            "backlogSeconds, utilization and ttftSloRatio are signals of role mixed",
        ),
        *ModelInstances.rules,
    )
    topology_key: ClassVar = None
    replicas: int | None = _initial("DecodePool")
    role: Literal["decode", "mixed"] = doc(
        "Role of the instances. decode: they generate tokens; prefill instances compute the "
        "prompts. mixed: they also compute the prompts, in the same batches. Immutable.",
        "decode",
    )
    autoscaling: DecodeAutoscaling = section(**DecodeAutoscaling.spelt_out())
    template: PodTemplate | None = pod_template("the decode instances")


class Kvp(Instances):
    """Workers that hold shards of the KV cache of long contexts."""

    rules: ClassVar[tuple[Schema, ...]] = (
        rule(
            "self.warmSpares <= self.autoscaling.maxReplicas",
            "warmSpares must be <= autoscaling.maxReplicas",
        ),
        rule(
            "self.maxWorkersPerRequest <= self.autoscaling.maxReplicas",
            "maxWorkersPerRequest must be <= autoscaling.maxReplicas",
        ),
    )
    role: ClassVar = "kvp"
    tensor_parallel: ClassVar = 1
    stages: ClassVar = 1
    stage_pods: ClassVar = "Shared"
    topology_key: ClassVar = None
    replicas: int | None = _initial("KVPWorkerPool")
    tokens_per_worker: int = doc(
        "Most tokens of one context at a worker; a longer context is split over workers.",
        262_144,
        ge=1024,
        le=16_777_216,
    )
    worker_capacity_tokens: int = doc(
        "Tokens of all contexts that fit a worker's memory. 0: tokensPerWorker.",
        0,
        ge=0,
        le=1_073_741_824,
    )
    max_workers_per_request: int = doc(
        "Most workers over which one context is spread.", 16, ge=1, le=128
    )
    warm_spares: int = doc("Idle workers that are kept ready.", 1, ge=0, le=64)
    growth_lead_seconds: int = doc(
        "Workers are started for the contexts' lengths after this time, s; set it to about the "
        "time that a worker takes to start.",
        30,
        ge=0,
        le=600,
    )
    gpus: int | None = _gpus("1")
    autoscaling: KvpAutoscaling = section(**KvpAutoscaling.spelt_out())
    template: PodTemplate | None = pod_template("the kvp instances")


Section = Prefill | Decode | Kvp


class ServiceRef(Record):
    """The ModelService that the pool belongs to."""

    name: str = doc("Its name, in the same namespace.", min_length=1, max_length=63)


Replicas = Annotated[
    int,
    Field(ge=0, le=1000, description="Instances of the pool; kubectl scale and an HPA set this."),
]
FIXED_SERVICE = rule("self.serviceRef == oldSelf.serviceRef", "serviceRef is immutable")


class PrefillGroupSpec(Prefill):
    """The wanted state."""

    rules = (FIXED_SERVICE, *Prefill.rules)
    service_ref: ServiceRef
    replicas: Replicas = 1


class DecodePoolSpec(Decode):
    """The wanted state."""

    rules = (FIXED_SERVICE, *Decode.rules)
    service_ref: ServiceRef
    replicas: Replicas = 1


class KVPWorkerPoolSpec(Kvp):
    """The wanted state."""

    rules = (FIXED_SERVICE, *Kvp.rules)
    service_ref: ServiceRef
    replicas: Replicas = 1


PoolSpec = PrefillGroupSpec | DecodePoolSpec | KVPWorkerPoolSpec


@dataclass(frozen=True, slots=True)
class PoolKind:
    """A kind of pool, and its section in a ModelService's spec.

    `role` names the section, images and labels; `spec.role` is the instances' role at the
    scheduler.
    """

    kind: str
    short: str
    role: str
    section: type[Section]
    spec: type[PoolSpec]

    def name_in(self, service: str) -> str:
        """Returns the name of the pool that a ModelService makes from the section."""
        return f"{service}-{self.role}"


KINDS: Mapping[str, PoolKind] = {
    kind.kind: kind
    for kind in (
        PoolKind("PrefillGroup", "pg", "prefill", Prefill, PrefillGroupSpec),
        PoolKind("DecodePool", "dp", "decode", Decode, DecodePoolSpec),
        PoolKind("KVPWorkerPool", "kvp", "kvp", Kvp, KVPWorkerPoolSpec),
    )
}
