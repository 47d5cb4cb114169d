"""The messages between the scheduler and its peers that have no type in `core`.

Where `core.scheduler` has an event, an effect or a command that says the same, the streams carry
that type.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.incarnation import Incarnation
from millrace.core.request import Chunk
from millrace.core.scheduler import effects, events
from millrace.core.scheduler.commands import (
    Drain,
    KeepTraces,
    KvShard,
    Member,
    PolicyInForce,
    Registered,
)
from millrace.core.scheduler.fleet.prompt_progress import PromptProgress

#: A `RequestSpec` that its proxy encoded once, for the store and for the scheduler. The scheduler
#: forwards the bytes to the instances without decoding them again.
EncodedSpec = bytes


# ---- proxy -> scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Hands a request to the scheduler."""

    spec: EncodedSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLoad:
    """Counts the requests that the proxy holds back until a pool has instances."""

    parked_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskProgress:
    """Asks for a `Progress` of each of these requests."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """Names a request that was submitted on an earlier stream: `events.Reopened`.

    `age_s`: since its arrival. `token_age_s`: since its first token; None: no token has come.
    """

    request: EncodedSpec
    decode: Incarnation | None
    age_s: float
    token_age_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllOpen:
    """Ends the list of open requests: all later submissions are new."""


ProxyMessage = (
    Submit | events.CancelRequested | ProxyLoad | AskProgress | OpenRequest | AllOpen | KeepTraces
)


# ---- scheduler -> proxy


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The request is accepted, and `decode` will stream its tokens.

    For a prefill-only request it is the prefill instance that will stream its result.
    """

    request_id: str
    decode: Member
    predicted_ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """The request is accepted, and no decode instance has room yet: `Placed` comes later."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Lists the instances that stream to proxies.

    A proxy keeps a token stream open to each decode instance, and opens one to a prefill instance
    that gets a prefill-only request.
    """

    decode: tuple[Member, ...]
    ready: bool  # at least one prefill instance and one decode instance accept work
    prefill: tuple[Member, ...] = ()
    lease: str = ""  # the name of the leader's lease in the store; empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Reports how far the prompt of a request without a first token is computed."""

    request_id: str
    prompt: PromptProgress


ProxyUpdate = Placed | Queued | Fleet | Progress | effects.Refuse | effects.Fail | effects.Suspect


# ---- scheduler -> worker


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAdmitDecode:
    """Carries an effect to its decode instance, which reads it as `commands.AdmitDecode`."""

    request: EncodedSpec
    attempt: int
    kept_tokens: int
    shards: tuple[KvShard, ...] = ()
    expected_tokens: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRunPrefill:
    """Carries an effect to its prefill instance, which reads it as `commands.RunPrefill`."""

    request: EncodedSpec
    chunks: tuple[Chunk, ...]
    decode: Member | None
    attempt: int
    group: tuple[Member, ...]
    shards: tuple[KvShard, ...] = ()


WorkerCommand = (
    Registered
    | SendAdmitDecode
    | SendRunPrefill
    | Drain
    | PolicyInForce
    | KeepTraces
    | effects.Order
    | effects.CancelOn
)
