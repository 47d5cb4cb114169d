"""Whom the two halves of a transfer speak to: each other's control side, and the pages' owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.core.kv_transfer import HandshakeAsk, HandshakeGrant, HistoryAsk, Ticket
from millrace.transfer.transport import Transport


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
