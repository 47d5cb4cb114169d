"""The inputs of the scheduler. `Machine.step(event, now_s)` is the only reader of events.

Instances are named by id. `generation` tells one incarnation of an instance from the next. Events
of an earlier incarnation are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.latency import SpLatency
from millrace.core.instance.standstill import Standstill
from millrace.core.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceJoined:
    """An instance registered. The same id with a higher generation replaces the earlier one."""

    instance_id: str
    generation: int
    role: str  # "prefill" | "decode" | "mixed" (both, packing its own batches) | "kvp"
    kv_pages: int
    page_tokens: int
    max_context_tokens: int
    max_batch: int
    model_hash: str
    latency: SpLatency = field(default_factory=SpLatency)
    node: str = ""  # instances of one node are close to each other; empty: a node of its own
    #: Layers that a page holds, from which a ring's buffers follow; 0: buffers are not counted.
    kv_layers: int = 0
    decode_step: DecodeStepTime | None = None  # of its batches; None: not known
    block_tokens: int = 0  # of its prefix cache; 0: it keeps none


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLeft:
    """An instance's stream ended or its lease lapsed: all that it held is gone."""

    instance_id: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDraining:
    """The instance announces that it leaves: it takes no new work ever; its present work may
    finish.
    """

    instance_id: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCordoned:
    """The autoscaler or an operator stops new work on the instance, or allows it again.

    The instance finishes the work that it has. An instance that leaves never takes new work again.
    """

    instance_id: str
    generation: int
    cordoned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBlocks:
    """The changes of an instance's prefix cache, as hashes of blocks (`prefix`).

    `whole`: `added` is the whole content of the cache.
    """

    whole: bool = False
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReported:
    """A heartbeat."""

    instance_id: str
    generation: int
    free_pages: int
    running: int
    waiting: int
    #: Decode: from token to token of what runs, since the last heartbeat; 0: no token followed one.
    tbt_s: float = 0.0
    cached: CachedBlocks | None = None
    standstill: Standstill | None = None  # prefill: work is prepared and none has begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """The client left, the proxy met a stop string, or a deadline passed."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLeft:
    """A proxy's stream ended: no client reads the output of its requests any more."""

    proxy_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStarted:
    """A chunk's group began to compute it, or continued after a suspension.

    The first instance of a group (`Chunk.instance_ids`) reports; so for the two events below.
    """

    instance_id: str
    generation: int
    request_id: str
    chunk_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFinished:
    instance_id: str
    generation: int
    request_id: str
    chunk_index: int
    compute_s: float
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSuspended:
    """The chunk stopped at a boundary, as ordered; its state is kept.

    `compute_s` is its compute so far, in seconds over all its spans.
    """

    instance_id: str
    generation: int
    request_id: str
    chunk_index: int
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReleased:
    """The instance holds no page of the request any more.

    `complete`, of a prefill instance: all of its part was computed and sent. `attempt`, of a decode
    instance or a KVP worker: the last attempt that it heard of; 0 names no attempt.
    """

    instance_id: str
    generation: int
    request_id: str
    complete: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLanded:
    """Decode has the KV of the first `tokens` tokens in its pages, where it stays."""

    instance_id: str
    generation: int
    request_id: str
    attempt: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStarted:
    """All KV landed; the request joined the instance's batch, `since_token_s` after the first token
    went to the proxy.
    """

    instance_id: str
    generation: int
    request_id: str
    since_token_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """Decode emitted the last token (stop | length) or dropped the request (cancelled)."""

    instance_id: str
    generation: int
    request_id: str
    reason: str
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """An instance could not do its part. After a retryable failure the request is prefilled again.

    Decode names the `attempt` (0: no attempt in particular) and the number of first tokens whose
    KV it keeps for the next attempt. If it keeps none, it releases the request.
    """

    instance_id: str
    generation: int
    request_id: str
    message: str
    retryable: bool
    attempt: int = 0
    kept_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChanged:
    """From now on requests are ranked by another policy: a name of `core.priority.POLICIES`."""

    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImprovementRateChanged:
    """The improvement that a larger group needs from now on: a fixed rate, or a table.

    `rows` of (arrivals per second, rate) count where `rate` is None.
    """

    rate: float | None = None
    rows: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed: the machine checks deadlines."""


Event = (
    InstanceJoined
    | InstanceLeft
    | InstanceDraining
    | InstanceCordoned
    | LoadReported
    | Submitted
    | CancelRequested
    | ProxyLeft
    | ChunkStarted
    | ChunkFinished
    | ChunkSuspended
    | RequestReleased
    | PrefixLanded
    | DecodeStarted
    | RequestFinished
    | RequestFailed
    | PolicyChanged
    | ImprovementRateChanged
    | Tick
)
