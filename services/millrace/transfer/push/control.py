"""The protocols that the two ends of a transfer need: the peer's control side, the pages' owner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.core.errors import TransferError
from millrace.core.kv.transfer import HandshakeAsk, HandshakeGrant, HistoryAsk, Ticket
from millrace.transfer.push.checksums import SumThread
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.regions import Memory


class KvPeer(Protocol):
    """The receiver's control side, as a sender calls it. Every call raises TransferError."""

    async def handshake(self, ask: HandshakeAsk, *, timeout_s: float) -> HandshakeGrant:
        """Raises HandshakeQueued when the receiver answered that no backend is free yet."""

    async def finish(self, ticket: Ticket, message: Any, *, timeout_s: float) -> None:  # noqa: ANN401 - the wire's type
        """Reports that prefill has finished."""

    async def abort(self, ticket: Ticket, *, reason: str, drained: bool, timeout_s: float) -> None:
        """Reports that the sender gives up."""

    async def send_history(self, ask: HistoryAsk, *, timeout_s: float) -> None:
        """Asks the receiver to write the KV that it kept of an earlier attempt to the asker's
        pages.

        Returns when the writes are in flight. Raises HandshakeRefused when some of the KV is
        missing.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveCallbacks:
    """The calls by which a receiver reports to the owner of its pages, by request.

    `on_first_tokens` gets the unchanged message of `finish`. `on_landed` reports that all KV is in
    its pages. `on_prefix(request, attempt, tokens)` reports that one more pass, other than the
    last, has landed with all passes before it. `on_failed(request, message, attempt, kept_tokens)`
    reports that the attempt will never land, and how many first tokens have landed: call `rewind`
    to them, or `release`. `on_corrupt(sender)` reports KV whose checksum was wrong, before
    `on_failed`.
    """

    on_first_tokens: Callable[[str, Any], None]
    on_landed: Callable[[str], None]
    on_prefix: Callable[[str, int, int], None]
    on_failed: Callable[[str, str, int, int], None]
    on_corrupt: Callable[[str], None] = lambda sender: None


@dataclass(frozen=True, slots=True)
class Outlet:
    """The transport and the region that all sessions of a manager send from: `pool`.

    `summing` makes the checksums for receivers that ask for them. `repeat` makes a call until the
    receiver has answered: until it raises TransferError no more.
    """

    transport: Transport
    pool: Memory
    region: int
    summing: SumThread
    repeat: Callable[[Callable[[], Awaitable[None]]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A receiver of a prompt's KV, and the tokens [start_token, end_token) that belong there.

    It has the model's `layers`; None where only its answer to the handshake says so.
    `final_message` makes this receiver's end message from the message of `Sending.finish`; None
    where another sender reports the end. The KV owner (`is_owner`) gets the first token.
    """

    peer: KvPeer
    receiver: tuple[str, int]
    start_token: int
    end_token: int
    layers: range | None = None
    final_message: Callable[[Any], Any] | None = None
    is_owner: bool = False


class Sending(Protocol):
    """A prompt's KV in flight to one receiver, or spread over several receivers. It is over once
    `finish` or `abort` has returned.
    """

    @property
    def failure(self) -> TransferError | None:
        """Returns the reason why nothing more can be sent; None while sending works. `finish`
        raises it.
        """

    @property
    def timings(self) -> SendTimings:
        """Returns the timings so far."""

    @property
    def receiver_ids(self) -> tuple[str, ...]:
        """Returns the ids of the receivers, in the order of their tokens."""

    def layer_ready(self, chunk_index: int, layer: int, start_token: int, num_tokens: int) -> None:
        """Sends a layer of a chunk that lies in its pages. Any thread may call it; returns at once.

        On a device the caller makes sure that the kernels that wrote the layer have ended. `layer`
        counts the model's layers.
        """

    async def opened(self) -> None:
        """Returns when every handshake has succeeded or failed."""

    async def finish(self, message: Any | None) -> None:  # noqa: ANN401 - the wire's type
        """Sends `message` after the handshake, then waits until every write was acknowledged.

        `message` is None for a member that does not lead its group. Returns early when a receiver
        no longer needs the KV. Raises TransferError when the receiver refused, the transfer failed,
        or it made no progress for `transfer_timeout_s`; call `abort` then.
        """

    async def abort(self, reason: str) -> None:
        """Gives up. Returns when nothing of the request is in flight: its pages may be freed.

        If a peer was stopped in the middle of a write, this waits until the peer continues or dies.
        """


@dataclass(slots=True)
class SendTimings:
    """Times for the waterfall, in seconds of time.monotonic; 0 for a step that has not happened."""

    opened_s: float
    granted_s: float = 0.0
    first_write_s: float = 0.0
    last_write_s: float = 0.0
    bytes: int = 0
    writes: int = 0

    @property
    def handshake_s(self) -> float:
        """Returns the seconds from opening to the grant."""
        return max(0.0, self.granted_s - self.opened_s)
