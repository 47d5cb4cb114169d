"""The protocols that the two ends of a transfer need: the peer's control side, the pages' owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.core.errors import TransferError
from millrace.core.kv.transfer import HandshakeAsk, HandshakeGrant, HistoryAsk, Ticket
from millrace.transfer.transport.base import Transport


class KvPeer(Protocol):
    """The receiver's control side, as a sender sees it. Every call raises TransferError."""

    async def handshake(self, ask: HandshakeAsk, *, timeout_s: float) -> HandshakeGrant:
        """Raises HandshakeQueued when the receiver answered that there is no backend yet."""

    async def finish(self, ticket: Ticket, message: Any, *, timeout_s: float) -> None:  # noqa: ANN401 - the wire's type
        """Tells that prefill has finished."""

    async def abort(self, ticket: Ticket, *, reason: str, drained: bool, timeout_s: float) -> None:
        """Tells that the sender gives up."""

    async def send_history(self, ask: HistoryAsk, *, timeout_s: float) -> None:
        """Has the receiver write KV that it kept of an earlier attempt to the asker's pages.

        Returns when it is on its way. Raises HandshakeRefused when it does not have all of it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveCallbacks:
    """What a receiver tells the owner of its pages, by request.

    on_first_tokens gets the message of `finish` as it came; on_landed says that all KV is in its
    pages. on_prefix(request, attempt, tokens) says that one more pass, but for the last, has landed
    with all before it; on_failed(request, message, attempt, kept_tokens) that the attempt will
    never land, and how many first tokens have: `rewind` to them, or `release`.
    """

    on_first_tokens: Callable[[str, Any], None]
    on_landed: Callable[[str], None]
    on_prefix: Callable[[str, int, int], None]
    on_failed: Callable[[str, str, int, int], None]


@dataclass(frozen=True, slots=True)
class Outlet:
    """What all sessions of a manager send through."""

    transport: Transport
    region: int
    metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A receiver of a prompt's KV, and the tokens [start_token, end_token) that belong there.

    It has the model's `layers`; None where only its answer tells. `word` makes of the message of
    `Sending.finish` what this receiver is told of the end; None where another sender tells it. The
    home is told token one.
    """

    peer: KvPeer
    receiver: tuple[str, int]
    start_token: int
    end_token: int
    layers: range | None = None
    word: Callable[[Any], Any] | None = None
    is_home: bool = False


class Sending(Protocol):
    """A prompt's KV on its way, to one receiver or spread over several. Over once `finish` or
    `abort` has returned."""

    @property
    def failure(self) -> TransferError | None:
        """Why nothing more can be sent; None while it can. `finish` raises it."""

    @property
    def timings(self) -> SendTimings:
        """As far as it has come."""

    @property
    def receiver_ids(self) -> tuple[str, ...]:
        """Where the KV goes, in the order of the tokens."""

    def layer_ready(self, chunk_index: int, layer: int, start_token: int, num_tokens: int) -> None:
        """A layer of a chunk lies in its pages: send it. From any thread; returns at once.

        On a device the caller makes sure that the kernels that wrote it have ended. `layer` is the
        model's.
        """

    async def opened(self) -> None:
        """Returns when the handshakes are over, well or not."""

    async def finish(self, message: Any | None) -> None:  # noqa: ANN401 - the wire's type
        """Sends `message` once shaken hands, then waits until every write was acknowledged.

        None of a member that is not the leader of its group: it has nothing to say. Returns too
        when a receiver has no more use for the KV. Raises TransferError when it was refused,
        failed, or made no progress for `transfer_timeout_s`; call `abort` then.
        """

    async def abort(self, reason: str) -> None:
        """Gives up. Returns when nothing of the request is in flight: its pages may be freed.

        A peer that was stopped in the middle of a write holds this up until it goes on or dies.
        """


@dataclass(slots=True)
class SendTimings:
    """For the waterfall. Seconds of time.monotonic; 0 while it has not happened."""

    opened_s: float
    granted_s: float = 0.0
    first_write_s: float = 0.0
    last_write_s: float = 0.0
    bytes: int = 0
    writes: int = 0

    @property
    def handshake_s(self) -> float:
        """From opening to the grant."""
        return max(0.0, self.granted_s - self.opened_s)
