"""An instance's reports to the scheduler, which reads them as `events.Reported`."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.latency import SpLatency
from millrace.core.incarnation import Incarnation
from millrace.core.instance.standstill import Standstill
from millrace.core.scheduler.held import Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The first message of an instance: its kind and its resources."""

    incarnation: Incarnation
    role: str  # prefill | decode | mixed | kvp
    address: str  # host:port of its gRPC server
    model_hash: str
    kv_pages: int
    page_tokens: int
    max_context_tokens: int
    max_batch: int = 0  # sequences in a batch
    latency: SpLatency | None = None
    node: str = ""  # empty: a node of its own
    kv_layers: int = 0  # layers of a page that a ring's buffers may use
    decode_step: DecodeStepTime | None = None  # of its batches; None: not known
    block_tokens: int = 0  # of its prefix cache; 0: it keeps none
    adaptive_chunks: bool = False  # mixed: chunks shrink as their history grows
    held: tuple[Held, ...] = ()  # requests that an earlier stream to a scheduler has left here


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBlocks:
    """The changes of an instance's prefix cache since its last report, as hashes of blocks
    (`prefix`).

    An instance reports as soon as a request leaves blocks, so that the next turn of a conversation
    goes where they are, and with every heartbeat what was evicted. `whole`: `added` is the whole
    content.
    """

    whole: bool = False
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The instance lives, and has this load."""

    free_pages: int = 0
    running: int = 0  # requests in compute or in the batch
    waiting: int = 0
    tbt_s: float = 0.0  # from token to token since the last heartbeat; 0: no token followed another
    standstill: Standstill | None = None  # prefill: work is prepared and none has begun


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStarted:
    """A chunk's SP group began to compute it, or continued after a suspension.

    The first instance of a group (`Chunk.instance_ids`) reports this and the two reports below.
    """

    request_id: str
    chunk_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFinished:
    """A chunk is computed; `last`: and so is the whole prompt.

    `ring_wait_s` and `history_wait_s` are parts of `compute_s`: waits for blocks of the ring, and
    for history that other members sent.
    """

    request_id: str
    chunk_index: int = 0
    compute_s: float = 0.0
    last: bool = False
    ring_wait_s: float = 0.0
    history_wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSuspended:
    """The chunk stopped at a boundary for another chunk; the instance keeps its state."""

    request_id: str
    chunk_index: int = 0
    compute_s: float = 0.0  # over all its spans of compute so far


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReleased:
    """The instance holds nothing of the request any more.

    `complete`: a prefill instance has computed and sent all of its part. `attempt`: the last
    attempt of which a decode instance or a KVP worker was informed; 0 names no attempt.
    """

    request_id: str
    complete: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLanded:
    """All KV of the first `tokens` tokens is in the decode instance's pages, and stays there."""

    request_id: str
    attempt: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAdvanced:
    """The first `tokens` tokens of a prompt are computed, in the middle of its chunk.

    Only progress is told by this report. An instance sends it where no decode instance reports
    `PrefixLanded`: a mixed instance, and the leader of a spread or a prefill-only request.
    """

    request_id: str
    attempt: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenSent:
    """Decode has sent the first token to the proxy: the request can't begin again."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStarted:
    """All KV has landed and the request has joined the batch."""

    request_id: str
    since_token_s: float = 0.0  # since the first token went to the proxy


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """Decode emitted the last token (stop | length) or dropped the request (cancelled | moved)."""

    request_id: str
    reason: str
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """The instance can't do its part of the request: in this attempt, or (attempt 0) in any.

    After a retryable failure the request is prefilled again. `kept_tokens`: the first tokens whose
    KV a decode instance keeps for the next attempt. With 0 it releases the request.
    `prompt_unread`: the request store did not give it the prompt, which the proxy still has.
    `fault`: "compute", an error of this instance; "transfer", an error between instances; empty, no
    error of an instance, such as a lack of room.
    """

    request_id: str
    message: str
    retryable: bool
    attempt: int = 0
    kept_tokens: int = 0
    prompt_unread: bool = False
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """The instance leaves when its present requests are done, and never takes new ones."""


#: Reports about one request.
RequestReport = (
    ChunkStarted
    | ChunkFinished
    | ChunkSuspended
    | RequestReleased
    | PrefixLanded
    | PromptAdvanced
    | FirstTokenSent
    | DecodeStarted
    | RequestFinished
    | RequestFailed
)
#: Reports about the instance itself.
InstanceReport = Heartbeat | CachedBlocks | Draining
Report = InstanceReport | RequestReport
