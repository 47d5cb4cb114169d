"""The scheduler's commands to an instance, as the instance reads them.

An effect (`effects`) names instances and requests by id; the command that carries it out brings
their addresses and the request's spec.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.core.incarnation import Incarnation
from millrace.core.request import Chunk
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.effects import ChunkRef
from millrace.core.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An instance and the address (host:port) of its gRPC server."""

    incarnation: Incarnation
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShard:
    """Token positions [start_token, end_token) of a request and its answer, at one instance
    (KVP)."""

    worker: Member
    start_token: int
    end_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The scheduler has taken the registration.

    `preemption` says where a running prefill yields: none | chunk | layer | operator. `policy` and
    `weights` are for mixed instances; an empty policy: the instance's own setting.
    """

    heartbeat_s: float = 0.0
    preemption: str = ""
    policy: str = ""
    weights: Weights = field(default_factory=Weights)
    lease: str = ""  # the name of the leader's lease in the store; empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrefill:
    """The command on the wire: compute these chunks, after all that the instance already holds.

    `group` has every instance of the chunks, in the order of the last chunk; empty: this instance
    alone. `shards` say where the KV goes, by position; empty: all of it to `decode`. Without
    `decode` the request is prefill only: the KV goes nowhere, and the leader sends its result.
    """

    request: RequestSpec
    chunks: tuple[Chunk, ...]
    decode: Member | None
    attempt: int = 1
    group: tuple[Member, ...] = ()
    shards: tuple[KvShard, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitDecode:
    """Reserve memory for a request, as `effects.AdmitDecode` says."""

    request: RequestSpec
    attempt: int = 1
    kept_tokens: int = 0
    shards: tuple[KvShard, ...] = ()
    expected_tokens: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Drop the request and free all that the instance holds of it."""

    request_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """End the requests that the instance still holds.

    Other instances take the requests over, unless `abort` ends them with an error.
    """

    abort: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The instance's run queue from now on, as `effects.Order` says."""

    queue: tuple[tuple[ChunkRef, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInForce:
    """The policy by which a mixed instance ranks its prompts from now on, and its weights."""

    name: str
    weights: Weights = field(default_factory=Weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepTraces:
    """Export the held spans of these traces: 32 hexadecimal digits each."""

    trace_ids: tuple[str, ...]


Command = (
    Registered | RunPrefill | AdmitDecode | Cancel | Drain | Order | PolicyInForce | KeepTraces
)
