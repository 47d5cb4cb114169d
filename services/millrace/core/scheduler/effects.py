"""The scheduler's actions.

Drivers (the live service, the simulator) carry effects out in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.incarnation import Incarnation
from millrace.core.request import Chunk, RequestState, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Tell the proxy that the request is accepted and which instance emits its tokens.

    `decode_id`: a decode instance; of a prefill-only request the instance that computes its last
    token.
    """

    request_id: str
    proxy_id: str
    decode_id: str
    predicted_ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Tell the proxy that the request is not accepted.

    code: overloaded | unavailable | too_large.
    """

    request_id: str
    proxy_id: str
    code: str
    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Tell the proxy that an accepted request is over without its answer.

    `resumable`: an instance was lost when the first token may have been out. The proxy knows the
    tokens that were out, and may submit the rest as a new request.
    `prompt_unread`: resumable, and no instance was lost: the proxy is to write the prompt again.
    `quarantined`: the request kills instances, and nobody may try it again.
    """

    request_id: str
    proxy_id: str
    message: str
    resumable: bool = False
    prompt_unread: bool = False
    quarantined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Tell the proxy which lost instances the request was open at: all of them, oldest first.

    A later submission of the request names them (`Request.deaths`).
    """

    request_id: str
    proxy_id: str
    deaths: tuple[Incarnation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitDecode:
    """Tell the decode instance to reserve memory for the request. Comes before `RunPrefill`.

    kept_tokens: the instance keeps the KV of these first tokens and expects the others. Earlier
    attempts left the tokens there; in a first attempt they come out of its prefix cache.
    attempt: differs in all such effects of one request.
    shards: in order of position. The instance holds the first shard, KVP workers hold the others.
    expected_tokens: of a choice's answer.
    """

    instance_id: str
    request_id: str
    attempt: int = 1
    kept_tokens: int = 0
    shards: tuple[Shard, ...] = ()
    expected_tokens: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrefill:
    """Send a request's plan to one of its instances, at the end of the instance's queue.

    Every instance that `chunks` names gets this effect. It queues the chunks that name it, each as
    an entry of its own (see `Order`). Chunks that begin after token 0 continue after the tokens
    that decode keeps. With `shards` the KV goes to their workers, else all KV goes to decode. An
    empty `decode_id` says prefill only: no KV is sent, and the leader emits the result.
    """

    instance_id: str
    request_id: str
    chunks: tuple[Chunk, ...]
    decode_id: str
    attempt: int = 1
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRef:
    """A chunk of a request that an instance holds."""

    request_id: str
    chunk_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The instance's queue from now on, replacing its present queue.

    An entry is the work of one forward pass: a chunk, or whole prompts batched together. Entry 0
    must run now: any other running entry is suspended at its next boundary, keeps its state, and
    continues when it is entry 0 again. When an entry ends, the next entry starts without another
    order. A chunk of a group starts when it is entry 0 at all its members, the chunk before it is
    finished and all members are free. References to finished or dropped work are skipped.
    """

    instance_id: str
    queue: tuple[tuple[ChunkRef, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelOn:
    """Tell an instance to drop the request and free all it holds of it.

    Harmless when it holds nothing.
    """

    instance_id: str
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Write the request's new state to the request store, off the decision path.

    `kv_tokens`: how many first tokens' KV lies at the decode instance.
    """

    request_id: str
    state: RequestState
    decode_id: str | None
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """Log that prepared work did not begin, and that these requests are planned again.

    ``waits``: (instance, what it waits for) of all instances that stood still.
    """

    request_ids: tuple[str, ...]
    waits: tuple[tuple[str, str], ...]


Effect = (
    Place | Refuse | Fail | Suspect | AdmitDecode | RunPrefill | Order | CancelOn | Record | Stalled
)
