"""Documents that outlive a request: one owner's JSON with a log of events and a time to live.

A document is open until its first final state; a final document never changes. The replica that
works on an open document renews a lease. A document whose lease has expired is lost: its replica
died, and any reader of the document may make it final. That is the fence: the next update of the
former replica returns False, and that replica stops its work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document. `body` and `source` are opaque here; `source` never changes.

    `lost`: it is open, and the lease of its replica has expired.
    """

    tenant: str
    body: bytes
    source: bytes
    final: bool
    lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A new body, events that follow the first `first_event` events, and whether it is final.

    The lease of an open document is renewed for `lease_s`. `expected`: an update changes nothing
    unless this is the document's body; None: whatever the body is.
    """

    body: bytes
    first_event: int = 0
    events: Sequence[bytes] = ()
    final: bool = False
    lease_s: float = 0.0
    expected: bytes | None = None


class DocumentStore(Protocol):
    """Documents by id. Every method raises StoreError when the store can't be reached."""

    async def create(
        self, document_id: str, *, tenant: str, source: bytes, change: Change, ttl_s: float
    ) -> None:
        """Records a document, which lives for `ttl_s`; replaces a document of the same id."""

    async def get(self, document_id: str) -> Document | None:
        """Returns the document, or None when it is deleted or expired."""

    async def update(self, document_id: str, change: Change) -> bool:
        """Returns whether the document was open, with the expected body, and so was changed.

        A final change, and a change with `expected`, whose first attempt lost its connection may
        return False, though it was made.
        """

    async def events(self, document_id: str, start: int) -> list[bytes]:
        """Returns the events from number `start` on; empty when there are none."""

    async def delete(self, document_id: str) -> None:
        """Removes a document and its events; does nothing when there is none."""

    async def close(self) -> None:
        """Closes the store's connections."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    tenant: str
    source: bytes
    expires_s: float
    body: bytes = b""
    final: bool = False
    lease_until_s: float = 0.0
    events: list[bytes] = field(default_factory=list)

    def change(self, change: Change, now_s: float) -> None:
        self.body, self.final = change.body, change.final
        self.lease_until_s = now_s + change.lease_s
        seen = len(self.events) - change.first_event
        self.events.extend(change.events[seen:])


class MemoryDocuments:
    """A DocumentStore in a dictionary. `clock` returns seconds that never decrease."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    async def create(
        self, document_id: str, *, tenant: str, source: bytes, change: Change, ttl_s: float
    ) -> None:
        now_s = self._clock()
        self._entries = {k: e for k, e in self._entries.items() if e.expires_s > now_s}
        entry = _Entry(tenant=tenant, source=source, expires_s=now_s + ttl_s)
        entry.change(change, now_s)
        self._entries[document_id] = entry

    async def get(self, document_id: str) -> Document | None:
        entry = self._find(document_id)
        if entry is None:
            return None
        return Document(
            tenant=entry.tenant,
            body=entry.body,
            source=entry.source,
            final=entry.final,
            lost=not entry.final and entry.lease_until_s <= self._clock(),
        )

    async def update(self, document_id: str, change: Change) -> bool:
        entry = self._find(document_id)
        if entry is None or entry.final or change.expected not in (None, entry.body):
            return False
        entry.change(change, self._clock())
        return True

    async def events(self, document_id: str, start: int) -> list[bytes]:
        entry = self._find(document_id)
        return [] if entry is None else entry.events[start:]

    async def delete(self, document_id: str) -> None:
        self._entries.pop(document_id, None)

    async def close(self) -> None:
        self._entries.clear()

    def _find(self, document_id: str) -> _Entry | None:
        entry = self._entries.get(document_id)
        return entry if entry is not None and entry.expires_s > self._clock() else None
