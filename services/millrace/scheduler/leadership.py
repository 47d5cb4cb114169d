"""Holds the lease of the leader: of all schedulers with one store, one leads at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from millrace.core.config import SchedulerConfig
from millrace.core.errors import MillraceError
from millrace.state.leader import lease_name
from millrace.state.leases import Lease, LeaseStore
from millrace.state.store import StoreError

log = logging.getLogger(__name__)

#: Renewals and attempts in one life of the lease.
RENEWALS = 4
ATTEMPTS = 8


class LeadershipLost(MillraceError):
    """Another scheduler leads or is to lead: this process must decide nothing more."""


class Leadership:
    """The lease of one process. `address`: where its peers reach it (host:port)."""

    def __init__(
        self,
        leases: LeaseStore,
        address: str,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._address = address
        self._name = lease_name(config.group)
        self._ttl_s = config.leader_lease_s
        self._clock = clock
        self._until_s = -1.0  # by this process's clock: nobody else can have the lease before
        self._renewed = asyncio.Event()
        self._seen = 0  # the largest epoch that this process knows of
        self._outrun = asyncio.Event()
        self._changed = asyncio.Event()  # ends the pause of `keep`
        self.lease: Lease | None = None
        self.leader = ""  # the address of the scheduler that leads, while this one stands by

    async def try_to_lead(self) -> Lease | None:
        """Takes the lease if it is free."""
        asked_s = self._clock()
        try:
            self.lease = await self._acquire()
            if self.lease is None:
                held = await self._leases.read(self._name)
                self.leader = held.address if held is not None else ""
                self._seen = max(self._seen, held.epoch if held is not None else 0)
        except StoreError as error:
            log.warning("the lease can't be taken: %s", error)
            return None
        if self.lease is not None:
            self._note_held(asked_s)
        return self.lease

    async def _acquire(self) -> Lease | None:
        lease = await self._leases.acquire(
            self._name, address=self._address, ttl_s=self._ttl_s, seen=self._seen
        )
        if lease is not None:
            self._seen = lease.epoch
        return lease

    async def lead(self) -> Lease:
        """Stands by until the lease is free, and takes it."""
        while True:
            if (lease := await self.try_to_lead()) is not None:
                return lease
            await asyncio.sleep(self._ttl_s / ATTEMPTS)

    async def keep(self, note: Callable[[], bytes], changed: asyncio.Event) -> None:
        """Renews the lease until cancelled; leaves the next leader the last `note`, which it renews
        at once when `changed` is set.

        Without an answer of the store this scheduler goes on: only a scheduler that the store
        answers can lead in its place, and the peers refuse the messages of the former leader then.
        Raises LeadershipLost when another scheduler has taken the lease, or the store has lost it,
        or after `outrun`.
        """
        assert self.lease is not None  # it leads
        epoch, self._changed = self.lease.epoch, changed
        while True:
            asked_s = self._clock()
            changed.clear()
            try:
                held = await self._leases.renew(
                    self._name, epoch=epoch, ttl_s=self._ttl_s, note=note()
                )
            except StoreError as error:
                log.warning("the lease can't be renewed: %s", error)
            else:
                if not held:
                    await self._bequeath(note())
                    raise LeadershipLost(f"epoch {epoch} is over")
                self._note_held(asked_s)
            if not self._outrun.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._ttl_s / RENEWALS):
                        await changed.wait()
            if self._outrun.is_set():
                seen = self._seen
                await self.release(note())
                await self._bequeath(note())  # takes the lease once more, with a later epoch
                raise LeadershipLost(f"a peer has seen epoch {seen}; it leads with {epoch}")

    def outrun(self, seen: int) -> None:
        """Notes that a peer has seen an epoch that this one is not later than: the store has lost
        its data since. `keep` ends, and the next leader's epoch is later.
        """
        self._seen = max(self._seen, seen)
        self._outrun.set()
        self._changed.set()

    async def _bequeath(self, note: bytes) -> None:
        """Leaves `note` to the next leader where the store has lost the lease with its data.

        This process does not lead on: another one may have led while it was away.
        """
        self._until_s = -1.0
        try:
            empty = await self._acquire()
            if empty is not None:
                log.warning("the store has lost the lease")
                await self._leases.release(
                    self._name, epoch=empty.epoch, note=b"" if empty.note else note
                )
        except StoreError as error:
            log.warning("the next leader gets no note: %s", error)

    async def certain(self) -> None:
        """Returns while this process certainly leads; otherwise waits for the next renewal."""
        while self._clock() >= self._until_s:
            self._renewed.clear()
            await self._renewed.wait()

    async def release(self, note: bytes = b"") -> None:
        """Lets another scheduler lead at once; without a `note` the last one stays.

        From now on this process never certainly leads: the ends of its streams end no request.
        """
        self._until_s = -1.0
        if self.lease is not None:
            try:
                await self._leases.release(self._name, epoch=self.lease.epoch, note=note)
            except StoreError as error:
                log.warning("the lease lapses by itself: %s", error)

    def _note_held(self, asked_s: float) -> None:
        self._until_s = asked_s + self._ttl_s
        self._renewed.set()
