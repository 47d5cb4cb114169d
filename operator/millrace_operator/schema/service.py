"""The spec of a ModelService."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from millrace.core.limits.rules import MOST_PER_DAY, MOST_PER_MINUTE
from millrace_operator.schema.gateway import Gateway
from millrace_operator.schema.pools import Decode, Kvp, Prefill, Section
from millrace_operator.schema.record import (
    Decimal,
    NonEmpty,
    PodTemplate,
    Record,
    SecretKey,
    SecretRef,
    Text,
    doc,
    empty,
    keyed_list,
    pod_template,
    rule,
    section,
)

TTFT = "Time to first token, in seconds as a decimal number in quotes."
TBT = "Time between two tokens, in milliseconds."
WEIGHT = {"ge": 1, "le": 1000}
Digest = Field(max_length=64, pattern="^[0-9a-f]{64}$", description="A digest.")
E2E = "Time to the last token, in seconds as a decimal number in quotes."

PullPolicy = Literal["Always", "IfNotPresent", "Never"]
ModelName = Annotated[Text, Field(description="Model name for clients.")]
ModelUri = Annotated[
    str,
    Field(
        max_length=1024,
        description="A hub id (org/name), or an absolute path inside the containers, such as "
        "/models/llama if weights are mounted.",
    ),
]


class ServedModel(Record):
    """The served model."""

    rules = (
        rule(
            "self.uri.startsWith('/') || "
            "self.uri.matches('^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+$')",
            "model.uri is a hub id (org/name) or an absolute path",
        ),
    )
    name: ModelName = Field(min_length=1)
    uri: ModelUri = Field(min_length=1)
    revision: str = doc(
        "Any name of the weights' version. A change replaces prefill and decode instances "
        "in pairs, so that no instance gets KV of other weights.",
        "",
        max_length=63,
    )
    max_context_tokens: int = doc("Longest context. 0: the model's own.", 0, ge=0, le=67_108_864)


class VolumeClaim(Record):
    """A claim that all nodes can attach at the same time (ReadOnlyMany or ReadWriteMany)."""

    claim_name: NonEmpty = doc("Name of the claim, in the same namespace.")
    sub_path: str = doc("Mounted folder of the volume.", "", max_length=1024)
    read_only: bool = doc("Whether the claim is attached read-only.", True)


class HostPath(Record):
    """A folder on every node. The pod security level `restricted` forbids it."""

    path: str = doc("Absolute path on the node.", max_length=1024, pattern="^/")


class WeightsImage(Record):
    """An OCI image or artifact whose files are the weights."""

    reference: str = doc("Image reference.", min_length=1, max_length=1024)
    pull_policy: PullPolicy = doc("When the image is pulled.", "IfNotPresent")


class HubToken(SecretRef):
    """The hub's access token."""

    key: SecretKey = "token"


class HubCache(Record):
    """Volume for the download, which lasts as long as the pod."""

    size_limit: str | None = doc(
        "Largest size, as a quantity such as 200Gi.",
        None,
        max_length=32,
        pattern=r"^[0-9]+(\.[0-9]+)?([EPTGMk]i?)?$",
    )


class Hub(Record):
    """Downloaded from the model hub by every instance when it starts."""

    secret_ref: HubToken | None = None
    cache: HubCache = empty(HubCache)


class Weights(Record):
    """Source of the weights, mounted read-only at /models. Without it, model.uri is a path
    inside the image, or a hub id.
    """

    rules = (
        rule(
            "[has(self.persistentVolumeClaim), has(self.hostPath), has(self.image), "
            "has(self.hub)].filter(one, one).size() <= 1",
            "weights takes one of persistentVolumeClaim, hostPath, image, hub",
        ),
    )
    persistent_volume_claim: VolumeClaim | None = None
    host_path: HostPath | None = None
    image: WeightsImage | None = None
    hub: Hub = empty(Hub)


class Objectives(Record):
    """Objectives of requests that give neither a class nor objectives."""

    ttft_seconds: Decimal = doc(TTFT, "10")
    tbt_milliseconds: int = doc(TBT, 100, ge=1, le=1_000_000)
    e2e_seconds: Decimal | None = doc(E2E, None, alias="e2eSeconds")


class SloClass(Record):
    """One class; slo gives the objectives that it leaves out."""

    name: str = doc("Name of the class.", min_length=1, max_length=63)
    ttft_seconds: Decimal | None = doc(TTFT, None)
    tbt_milliseconds: int | None = doc(TBT, None, ge=1, le=1_000_000)
    e2e_seconds: Decimal | None = doc(E2E, None, alias="e2eSeconds")
    weight: int | None = doc("Weight of the class beside the others; absent: 1.", None, **WEIGHT)


class TenantLimits(Record):
    """Limits of a tenant over all gateway pods. Absent: no limit."""

    requests_per_minute: int | None = doc("Requests a minute.", None, ge=1, le=MOST_PER_MINUTE)
    tokens_per_minute: int | None = doc(
        "Tokens a minute, of prompts and generated.", None, ge=1, le=MOST_PER_MINUTE
    )
    prompt_tokens_per_minute: int | None = doc(
        "Tokens of prompts a minute.", None, ge=1, le=MOST_PER_MINUTE
    )
    generated_tokens_per_minute: int | None = doc(
        "Generated tokens a minute.", None, ge=1, le=MOST_PER_MINUTE
    )
    tokens_per_day: int | None = doc(
        "Tokens a day, of prompts and generated; the day begins at midnight UTC.",
        None,
        ge=1,
        le=MOST_PER_DAY,
    )
    concurrency: int | None = doc("Requests open at once.", None, ge=1, le=1_000_000)


class Tenant(Record):
    """A tenant: requests with one of its API keys."""

    name: str = doc("Name of the tenant.", min_length=1, max_length=63)
    key_sha256: tuple[Annotated[str, Digest], ...] = doc(
        "SHA-256 digests of its API keys, in hexadecimal.", max_length=16, strict=False
    )
    weight: int | None = doc(
        "Weight of the tenant beside the others of its class; absent: 1.", None, **WEIGHT
    )
    models: tuple[Annotated[NonEmpty, Field(description="Name of a model.")], ...] | None = doc(
        "Models that it may use; absent: all.", None, max_length=64, strict=False
    )
    slo_classes: tuple[Annotated[NonEmpty, Field(description="Name of a class.")], ...] | None = (
        doc(
            "Classes that it may use; the first is that of requests that name none. Absent: all.",
            None,
            max_length=32,
            strict=False,
        )
    )
    limits: TenantLimits | None = None


class Scheduling(Record):
    """How the scheduler orders and places requests."""

    policy: Literal["fcfs", "edf", "d_edf", "s_edf", "lrs", "lars", "lars_deadline", "millrace"] = (
        doc("Order of requests.", "millrace")
    )
    preemption: Literal["none", "chunk", "layer", "operator"] = doc(
        "Where a running prefill yields to a prefill that precedes it.", "operator"
    )
    planner: Literal["auto", "least_queue", "fixed_sp", "single_chunk", "esp", "cdsp"] = doc(
        "Placement of prefill work on instances and SP groups; auto: cdsp if times of SP "
        "groups are known, else least_queue.",
        "auto",
    )
    max_sp_degree: int = doc(
        "Most instances of a group that the planner fixed_sp forms.", 8, ge=1, le=128
    )


class StoreUrl(SecretRef):
    """URL of the server: redis://, redis+sentinel:// or redis+cluster://; rediss with TLS."""

    key: SecretKey = "url"
    per_service: bool = doc(
        "Whether each service has a key and a user of its own: url-proxy, url-scheduler, "
        "url-prefill, url-decode and url-kvp if `key` is url.",
        False,
    )

    def key_of(self, role: str) -> str:
        """Returns the key of a role's URL."""
        return f"{self.key}-{role}" if self.per_service else self.key


class Store(Record):
    """The Redis server that keeps request state. Default: the server that the chart set up for the
    operator.
    """

    secret_ref: StoreUrl


class Tls(Record):
    """Mutual TLS between the services. Certificates carry the DNS name millrace.internal. Default:
    the certificates that the chart set up for the operator.
    """

    secret_name: NonEmpty = doc("Secret with the keys ca.crt, tls.crt and tls.key.")


class Scheduler(Record):
    """The scheduler."""

    replicas: int = doc(
        "Scheduler pods: one leads, the others stand by and take over within 3 s.", 1, ge=1, le=9
    )
    template: PodTemplate | None = pod_template("the scheduler")


SloClasses = Annotated[
    tuple[SloClass, ...],
    keyed_list("Classes that clients choose by the header x-millrace-class.", "name", 32),
]
Tenants = Annotated[
    tuple[Tenant, ...],
    keyed_list("Tenants, told apart by their API keys, who share a class by weight.", "name", 128),
]
Settings = Annotated[
    Mapping[str, Annotated[str, Field(max_length=1024, description="The value, as text.")]],
    Field(
        max_length=64,
        description="Further settings of all services, as in docs/reference/configuration.md: "
        "`section.field: value`.",
    ),
]
Paused = Annotated[bool, Field(description="True: the operator changes nothing.")]


class ModelServiceSpec(Record):
    """The wanted state."""

    rules = (
        rule("self.model.name == oldSelf.model.name", "model.name is immutable"),
        rule(
            "!has(self.gateway.canary) || (has(self.gateway.models) && "
            "self.gateway.models.exists(model, model.service == self.gateway.canary.service))",
            "gateway.canary.service is none of gateway.models",
        ),
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
    model: ServedModel
    weights: Weights = empty(Weights)
    slo: Objectives = section()
    slo_classes: SloClasses | None = None
    tenants: Tenants | None = None
    scheduling: Scheduling = section()
    settings: Settings | None = None
    redis: Store | None = None
    tls: Tls | None = None
    gateway: Gateway = section()
    scheduler: Scheduler = empty(Scheduler)
    prefill: Prefill | None = None
    decode: Decode
    kvp: Kvp | None = None
    paused: Paused = False

    @property
    def pools(self) -> Mapping[str, Section]:
        """The wanted pools, by role."""
        found = {"prefill": self.prefill, "decode": self.decode, "kvp": self.kvp}
        return {role: pool for role, pool in found.items() if pool is not None}
