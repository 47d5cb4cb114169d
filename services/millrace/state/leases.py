"""Leases with fencing tokens: of several processes with one store, one holds a lease at a time.

Every acquisition gives a later epoch than all before it: epochs are at least the time in ms, and no
two are of one second, from which the attempts at requests are numbered
(`core.epochs`). The holder names its epoch in what it does, and others refuse an epoch
that is not later than what they have seen.

Epochs of quick successions are ahead of the time, and clocks differ. So a store that has lost its
data needs to be told of the epochs before: by its taker, or else by the holder's peers, who know
one that is not later. By the ms an epoch ahead of the time is another one than any before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A lease, as its last holder has it. `left_s`: until it lapses; 0 or less: anyone may take it.

    `address`: where the holder is reached (host:port). `note`: what it leaves to the next holder.
    """

    epoch: int
    address: str
    left_s: float
    note: bytes = b""


class LeaseStore(Protocol):
    """Leases by name. Every method raises StoreError when the store can't be reached."""

    async def acquire(
        self, name: str, *, address: str, ttl_s: float, seen: int = 0
    ) -> Lease | None:
        """Takes a free or lapsed lease, with the note of its former holder; None if it is held.

        `seen`: the largest epoch that the caller knows of.
        """

    async def renew(self, name: str, *, epoch: int, ttl_s: float, note: bytes) -> bool:
        """Holds the lease for `ttl_s` from now on. Returns False once another one has taken it.

        A lapsed lease that nobody has taken is held again.
        """

    async def release(self, name: str, *, epoch: int, note: bytes = b"") -> None:
        """Lets another process take the lease at once. Does nothing after a later acquisition.

        An empty `note` leaves the note as it is.
        """

    async def read(self, name: str) -> Lease | None:
        """Returns the lease, held or lapsed; None if nobody has ever held it."""

    async def close(self) -> None:
        """Closes the store's connections."""


class MemoryLeases:
    """A LeaseStore inside one process. `clock` returns Unix seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._until_s: dict[str, float] = {}

    async def acquire(
        self, name: str, *, address: str, ttl_s: float, seen: int = 0
    ) -> Lease | None:
        now_s, known = self._clock(), self._leases.get(name)
        if known is not None and self._until_s[name] > now_s:
            self._until_s[name] = min(self._until_s[name], now_s + ttl_s)  # it was set back
            return None
        last = max(known.epoch if known else 0, seen)
        now_ms = int(now_s * 1000)
        epoch = max(last - last % 1000 + 1000 + now_ms % 1000, now_ms)
        note = known.note if known else b""
        self._leases[name] = Lease(epoch=epoch, address=address, left_s=ttl_s, note=note)
        self._until_s[name] = now_s + ttl_s
        return self._leases[name]

    async def renew(self, name: str, *, epoch: int, ttl_s: float, note: bytes) -> bool:
        known = self._leases.get(name)
        if known is None or known.epoch != epoch:
            return False
        self._leases[name] = replace(known, note=note)
        self._until_s[name] = self._clock() + ttl_s
        return True

    async def release(self, name: str, *, epoch: int, note: bytes = b"") -> None:
        known = self._leases.get(name)
        if known is not None and known.epoch == epoch:
            self._leases[name] = replace(known, note=note or known.note)
            self._until_s[name] = self._clock()

    async def read(self, name: str) -> Lease | None:
        known = self._leases.get(name)
        return known and replace(known, left_s=self._until_s[name] - self._clock())

    async def close(self) -> None:
        return
