"""Follows who leads the schedulers: the leader's address is in its lease, in the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from millrace.concurrency import until_one_ends
from millrace.core.instance.fence import EpochFence
from millrace.state.leases import LeaseStore
from millrace.state.store import StoreError

log = logging.getLogger(__name__)

POLL_S = 0.2


def lease_name(group: str) -> str:
    """Returns the name of the lease of the schedulers of `scheduler.group`."""
    return f"scheduler:{group}" if group else "scheduler"


class LeaderWatch:
    """Knows the leader while `run` runs, once a scheduler has named the lease.

    Until then the configured addresses are tried in turn.
    """

    def __init__(self, leases: LeaseStore, addresses: str) -> None:
        """`addresses`: of schedulers of one group, host:port separated by commas."""
        self._leases = leases
        self._configured = [one.strip() for one in addresses.split(",")]
        self._tried = 0
        self._lease = ""
        self._address = ""  # the leader's, if it is known
        self._news = asyncio.Event()
        #: How often another scheduler has come to lead.
        self.changes = 0
        self._followed = 0  # after so many changes the present stream's scheduler leads
        self._asked = ""  # whom a stream has been opened to that has not answered yet
        #: Refuses messages of schedulers that led before.
        self.fence = EpochFence()

    def address(self) -> str:
        """Returns the address to connect to now."""
        if self._address:
            return self._address
        self._tried += 1
        return self._configured[(self._tried - 1) % len(self._configured)]

    def follow(self, lease: str, address: str) -> None:
        """Notes that the scheduler at `address` leads, and by which lease."""
        self._lease, self._address, self._asked = lease, address, ""
        self._followed = self.changes

    def hint(self, address: str) -> None:
        """Notes an address that a scheduler which stands by has named; empty: it knows none."""
        self._address = address

    async def run(self) -> None:
        """Reads the lease until cancelled. Without an answer the last leader stays."""
        answers = True
        while True:
            try:
                await self._read()
                answers = True
            except StoreError as error:
                if answers:
                    log.warning("the schedulers' lease can't be read: %s", error)
                answers = False
            await asyncio.sleep(POLL_S)

    async def _read(self) -> None:
        lease = await self._leases.read(self._lease) if self._lease else None
        if lease is None:
            return
        if lease.epoch != self.fence.epoch and self.fence.admits(lease.epoch):
            self._address = lease.address
            self.changes += 1
            if lease.address == self._asked:
                self._followed = self.changes  # it had led before its lease was read
            self._news.set()
        elif not self._address and lease.left_s > 0:  # a stream to the leader has failed
            self._address = lease.address

    async def replaced(self, changes: int, timeout_s: float | None = None) -> bool:
        """Waits until another scheduler leads than after so many `changes`; returns False after the
        time-out.
        """
        while self.changes == changes:
            self._news.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return False
        return True

    async def serve_until_replaced(
        self, address: str, changes: int, stream: Coroutine[Any, Any, None]
    ) -> None:
        """Runs `stream`, to the scheduler at `address`, to its end, or until another scheduler
        leads than after so many `changes`. It goes on if that is the scheduler at `address`, which
        has not answered yet: a standby may have named it before its lease is read here.
        """
        self._asked = address
        self._followed = self.changes if address == self._address else changes
        try:
            await until_one_ends(stream, self._left_behind())
        finally:
            self._asked = ""

    async def _left_behind(self) -> None:
        """Returns when another scheduler leads than the one of the present stream."""
        while self.changes == self._followed:
            await self.replaced(self._followed)
