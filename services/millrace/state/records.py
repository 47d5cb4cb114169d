"""Records that tenants create, list and change: the files and batches of the proxy.

A record is open until it is final; a final record never changes. Every change names the version
that it was made from, so of two changes to one version the store makes one. The process that works
on an open record holds a lease. A claim of a record whose lease has expired makes a new version:
the next change of the former owner, made from the version before, fails. That is the fence.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One version of a record. `body` is opaque here; an empty `owner` means that none works."""

    record_id: str
    tenant: str
    body: bytes
    version: int
    owner: str
    final: bool


class RecordStore(Protocol):
    """Records of one kind by id. Every method raises StoreError if the store is unreachable."""

    async def create(
        self,
        record_id: str,
        *,
        tenant: str,
        body: bytes,
        at_s: float,
        ttl_s: float,
        final: bool = False,
    ) -> None:
        """Records version 1, which lives for `ttl_s`. `at_s`, a Unix time, orders pages."""

    async def get(self, record_id: str) -> Record | None:
        """Returns the record, or None when it is deleted or expired."""

    async def get_many(self, record_ids: Sequence[str]) -> list[Record | None]:
        """Returns what `get` returns for each id."""

    async def swap(self, old: Record, body: bytes, *, final: bool = False) -> bool:
        """Replaces the body, and returns True, if `old` is open and the newest version.

        If the connection was lost, the result may be False though the change was made.
        """

    async def delete(self, record_id: str, tenant: str) -> bool:
        """Removes a record; returns whether there was one."""

    async def page(
        self, tenant: str, *, after: str | None, count: int, newest_first: bool
    ) -> list[str] | None:
        """Returns the next ids after the id `after`; None if the tenant has no record `after`.

        Expired records may be among the ids.
        """

    async def claimable(self, count: int) -> list[str]:
        """Returns open records that probably have no live owner."""

    async def claim(self, record_id: str, owner: str, lease_s: float) -> Record | None:
        """Makes `owner` the owner, and returns the new version; None if another has a lease."""

    async def renew(self, record_id: str, owner: str, lease_s: float) -> bool:
        """Lengthens the lease; returns False if the record is final or has another owner."""

    async def release(self, record_id: str, owner: str) -> None:
        """Ends the owner's lease, so that another can claim the record at once."""

    async def close(self) -> None:
        """Closes the store's connections."""


class Deadlines(Protocol):
    """Names with the Unix time after which they are no longer needed, s."""

    async def set(self, names: Sequence[str], at_s: float) -> None:
        """Gives all names this time."""

    async def passed(self, now_s: float, count: int) -> list[str]:
        """Returns at most `count` names whose time is before `now_s`, the earliest first."""

    async def forget(self, names: Sequence[str]) -> None:
        """Removes the names."""

    async def close(self) -> None:
        """Closes the store's connections."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    record: Record
    at_s: float
    expires_s: float
    lease_until_s: float = 0.0


class MemoryRecords:
    """A RecordStore in a dictionary. `clock` returns seconds that never decrease."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._rows: dict[str, list[tuple[float, str]]] = {}  # by tenant, in order of creation

    async def create(
        self,
        record_id: str,
        *,
        tenant: str,
        body: bytes,
        at_s: float,
        ttl_s: float,
        final: bool = False,
    ) -> None:
        self._drop_expired()
        record = Record(
            record_id=record_id, tenant=tenant, body=body, version=1, owner="", final=final
        )
        self._entries[record_id] = _Entry(record=record, at_s=at_s, expires_s=self._clock() + ttl_s)
        insort(self._rows.setdefault(tenant, []), (at_s, record_id))

    async def get(self, record_id: str) -> Record | None:
        entry = self._find(record_id)
        return None if entry is None else entry.record

    async def get_many(self, record_ids: Sequence[str]) -> list[Record | None]:
        return [await self.get(record_id) for record_id in record_ids]

    async def swap(self, old: Record, body: bytes, *, final: bool = False) -> bool:
        entry = self._find(old.record_id)
        if entry is None or entry.record.final or entry.record.version != old.version:
            return False
        self._change(entry, body=body, final=final)
        return True

    async def delete(self, record_id: str, tenant: str) -> bool:
        return self._remove(record_id)

    async def page(
        self, tenant: str, *, after: str | None, count: int, newest_first: bool
    ) -> list[str] | None:
        rows = self._rows.get(tenant, [])
        start = len(rows) if newest_first else 0
        if after is not None:
            entry = self._entries.get(after)
            if entry is None or entry.record.tenant != tenant:
                return None
            row = (entry.at_s, after)
            start = bisect_left(rows, row) if newest_first else bisect_right(rows, row)
        if newest_first:
            return [name for _, name in reversed(rows[max(0, start - count) : start])]
        return [name for _, name in rows[start : start + count]]

    async def claimable(self, count: int) -> list[str]:
        now_s = self._clock()
        free = (n for n, e in self._entries.items() if self._is_free(e, now_s))
        return [name for name, _ in zip(free, range(count), strict=False)]

    async def claim(self, record_id: str, owner: str, lease_s: float) -> Record | None:
        entry = self._find(record_id)
        if entry is None or not self._is_free(entry, self._clock()):
            return None
        self._change(entry, owner=owner)
        entry.lease_until_s = self._clock() + lease_s
        return entry.record

    async def renew(self, record_id: str, owner: str, lease_s: float) -> bool:
        entry = self._find(record_id)
        if entry is None or entry.record.final or entry.record.owner != owner:
            return False
        entry.lease_until_s = self._clock() + lease_s
        return True

    async def release(self, record_id: str, owner: str) -> None:
        entry = self._find(record_id)
        if entry is not None and entry.record.owner == owner and not entry.record.final:
            self._change(entry, owner="")
            entry.lease_until_s = 0.0

    async def close(self) -> None:
        self._entries.clear()
        self._rows.clear()

    def _change(self, entry: _Entry, **changes: bytes | str | bool) -> None:
        version = entry.record.version + 1
        entry.record = replace(entry.record, version=version, **changes)  # type: ignore[arg-type]

    def _is_free(self, entry: _Entry, now_s: float) -> bool:
        return not entry.record.final and entry.lease_until_s <= now_s < entry.expires_s

    def _find(self, record_id: str) -> _Entry | None:
        entry = self._entries.get(record_id)
        return entry if entry is not None and entry.expires_s > self._clock() else None

    def _remove(self, record_id: str) -> bool:
        entry = self._entries.pop(record_id, None)
        if entry is None:
            return False
        self._rows[entry.record.tenant].remove((entry.at_s, record_id))
        return entry.expires_s > self._clock()

    def _drop_expired(self) -> None:
        now_s = self._clock()
        for name in [n for n, e in self._entries.items() if e.expires_s <= now_s]:
            self._remove(name)


class MemoryDeadlines:
    """Deadlines in a dictionary."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}

    async def set(self, names: Sequence[str], at_s: float) -> None:
        self._times.update((name, at_s) for name in names)

    async def passed(self, now_s: float, count: int) -> list[str]:
        found = sorted((at_s, name) for name, at_s in self._times.items() if at_s < now_s)
        return [name for _, name in found[:count]]

    async def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self._times.pop(name, None)

    async def close(self) -> None:
        self._times.clear()
