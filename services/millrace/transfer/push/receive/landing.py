"""Takes written parts to their pages and checks them there, before they are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from millrace.core.kv.layout import KvLayout
from millrace.transfer.push.checksums import PartSums, SumThread, require_readable
from millrace.transfer.push.handshake import Lease
from millrace.transfer.push.messages import Kind, Message, WrittenRange
from millrace.transfer.push.receive.admission import Admission
from millrace.transfer.push.receive.buffers import Buffers
from millrace.transfer.push.receive.coverage import CoverageError
from millrace.transfer.push.receive.lease_table import LeaseTable
from millrace.transfer.transport.regions import Memory

T = TypeVar("T")


class Checksums:
    """Checks parts in a pool, on a thread of its own."""

    def __init__(self, pool: Memory, layout: KvLayout) -> None:
        """Raises ConfigError for a pool that the host can't read."""
        require_readable(pool, layout)
        self._pool = pool
        self._thread = SumThread("kv-check")
        self._sums: dict[Lease, PartSums] = {}

    def wrong(
        self, lease: Lease, admission: Admission, message: Message
    ) -> Future[WrittenRange | None]:
        """Finds the first part of a message that is not in its pages as its sender summed it."""
        return self._thread.wrong(self._of(lease, admission), message.parts)

    def forget(self, lease: Lease) -> None:
        self._sums.pop(lease, None)

    def close(self) -> None:
        self._thread.close()

    def _of(self, lease: Lease, admission: Admission) -> PartSums:
        if lease not in self._sums:
            self._sums[lease] = PartSums(self._pool, admission.side, lease.layout, sends=False)
        return self._sums[lease]


@dataclass(frozen=True, slots=True, kw_only=True)
class Landings:
    """The way of a written message: its copy out of a staging slot, its checksums, its count.

    A message that can't be right, and a message whose bytes are wrong, fail the attempt: no token
    is read from such KV. `on_landed(admission, lease, message)` counts a message;
    `on_failed(admission, reason, sound)` is called for an attempt that must end. Belongs to the
    event loop.
    """

    buffers: Buffers | None
    checksums: Checksums | None
    leases: LeaseTable
    on_landed: Callable[[Admission, Lease, Message], None]
    on_failed: Callable[[Admission, str, bool], None]
    on_corrupt: Callable[[Lease], None]
    on_settled: Callable[[], None]

    def take(self, lease: Lease, admission: Admission, message: Message) -> None:
        """Takes a message of an attempt that is awaited."""
        try:
            admission.check(message.parts, lease)
        except CoverageError as error:
            self.on_failed(admission, str(error), False)
            return
        if self.buffers is None or lease.backend is None:
            self._check(lease, admission, message)
            return

        def copied(error: BaseException | None, _: None) -> None:
            if error is not None:
                self.on_failed(admission, f"a staging slot could not be copied: {error}", True)
                return
            self.leases.send(lease, Kind.SLOT_FREE, message.slot)
            self._check(lease, admission, message)

        job = self.buffers.scatter(message, lease, lease.backend, admission)
        self._after(job, lease, admission, copied)

    def _check(self, lease: Lease, admission: Admission, message: Message) -> None:
        if self.checksums is None:
            self.on_landed(admission, lease, message)
            return

        def checked(error: BaseException | None, wrong: WrittenRange | None) -> None:
            if error is not None:
                self.on_failed(admission, f"its KV could not be checked: {error}", False)
            elif wrong is not None:
                end = wrong.start_token + wrong.num_tokens
                self.on_corrupt(lease)
                self.on_failed(
                    admission,
                    f"the KV of layer {wrong.layer}, tokens {wrong.start_token}..{end - 1} from "
                    f"{lease.sender.id} has another checksum than was sent",
                    False,
                )
            else:
                self.on_landed(admission, lease, message)

        self._after(self.checksums.wrong(lease, admission, message), lease, admission, checked)

    def _after(
        self,
        job: Future[T],
        lease: Lease,
        admission: Admission,
        then: Callable[[BaseException | None, T | None], None],
    ) -> None:
        """Calls `then(error, result)` on the loop after a job that reads or writes pages, if the
        attempt is still awaited. Until then the pages stay in quarantine.
        """
        lease.copies += 1
        loop = asyncio.get_running_loop()

        def ended() -> None:
            lease.copies -= 1
            if admission.awaits(lease.attempt):
                error = job.exception()
                then(error, job.result() if error is None else None)
            self.on_settled()

        job.add_done_callback(lambda _: loop.call_soon_threadsafe(ended))
