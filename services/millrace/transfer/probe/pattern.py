"""Checks that bytes really travel: each end writes a pattern to the other end and compares.

An end is a transport of its own, made for one probe and closed after it. Requests use another
transport, so an unfinished probe cannot touch their memory. When the end closes, its registered
buffer, its peer and its writes in flight go with it. An instance makes these ends in separate
processes (`process.py`): if the transport's library aborts, only the probe fails.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from millrace.core.errors import TransferError
from millrace.transfer.transport.base import Transport, outcome
from millrace.transfer.transport.regions import Bytes, ByteView
from millrace.transfer.transport.runs import Runs

log = logging.getLogger(__name__)

#: Bytes of a pattern between instances, equal at both ends. Large enough that UCX moves it in the
#: way it moves KV, not as a short message.
PATTERN_BYTES = 256 << 10

#: Attempts of the loopback probe when the process of its other end dies.
LOOPBACK_TRIES = 3

#: Seconds to wait for news of the other end's death after our own end has failed.
DEATH_S = 10.0

#: First byte of a probe's notification, by which a transport finds its subscriber.
CHANNEL = 9


class ProbeError(TransferError):
    """The bytes did not arrive, or other bytes did."""


class ProbeDiedError(ProbeError):
    """The process of the end died."""


class End(Protocol):
    """One of the two ends of a probe. It expects the pattern of its `seed`."""

    @property
    def name(self) -> str:
        """The name of its transport."""

    @property
    def seed(self) -> int: ...

    @property
    def metadata(self) -> bytes:
        """The metadata of its transport."""

    async def exchange(
        self,
        metadata: bytes,
        seed: int,
        timeout_s: float,
        *,
        peer_region: int = 0,
        peer_start: int = 0,
    ) -> None:
        """Writes the pattern of `seed` to the end that `metadata` describes, and checks the pattern
        here. The peer's part of its region begins with the byte `peer_start`.

        Raises ProbeError with the step that failed, or the transport's TransferError. The caller's
        transport forgets the peer when it closes.
        """


#: Opens an end under (name, seed, bytes of a pattern). Raises TransferError on failure.
OpenEnd = Callable[[str, int, int], AbstractAsyncContextManager[End]]


class ProbeEnd:
    """An end in this process, as `End`; belongs to an event loop.

    It sends from the first `size` bytes of its part of a region and receives into the next `size`
    bytes. The part begins with the region's first byte, or where an exchange says.
    """

    def __init__(
        self, transport: Transport, view: Bytes, *, region: int, seed: int, size: int
    ) -> None:
        """`view` shows the transport's `region`, which is registered already."""
        self.name = transport.name
        self.seed = seed
        self.metadata = transport.metadata()
        self._transport = transport
        self._view = view
        self._region = region
        self._size = size
        self._lock = threading.Lock()
        self._arrived: dict[str, Future[None]] = {}  # by peer
        transport.subscribe(CHANNEL, self._hear)

    async def exchange(
        self,
        metadata: bytes,
        seed: int,
        timeout_s: float,
        *,
        peer_region: int = 0,
        peer_start: int = 0,
        start: int = 0,
    ) -> None:
        """Works as `End.exchange`; this end's part begins with the byte `start`."""
        doing = "connecting to the peer"
        try:
            async with asyncio.timeout(timeout_s):
                peer = await outcome(self._transport.connect(metadata))
                doing = "writing to the peer"
                self._view.write(start, pattern(seed, self._size))
                runs = Runs.of(start, peer_start + self._size, self._size)
                written = self._transport.write(
                    peer, runs, bytes([CHANNEL]), region=self._region, peer_region=peer_region
                )
                await outcome(written)
                doing = "waiting for what the peer writes"
                await outcome(self._arrival(peer))
        except TimeoutError:
            raise ProbeError(f"{doing} did not end within {timeout_s:g} s") from None
        self._check(start)

    def _hear(self, peer: str, payload: bytes) -> None:
        """Notes that a peer has written. Runs on the transport's thread."""
        if not (arrived := self._arrival(peer)).done():
            arrived.set_result(None)

    def _arrival(self, peer: str) -> Future[None]:
        """Returns a future that is done once `peer` has written, maybe before we know the peer."""
        with self._lock:
            if peer not in self._arrived:
                self._arrived[peer] = Future()
                self._arrived[peer].set_running_or_notify_cancel()  # waiters cannot cancel it
            return self._arrived[peer]

    def _check(self, start: int) -> None:
        found = self._view.read(start + self._size, self._size)
        wanted = pattern(self.seed, self._size)
        if found != wanted:
            first = next(
                i for i, pair in enumerate(zip(found, wanted, strict=True)) if len({*pair}) > 1
            )
            raise ProbeError(f"byte {first} of {self._size} is not what the peer wrote")


def pattern(seed: int, size: int) -> bytes:
    """Returns the same bytes for the same seed in every process."""
    return random.Random(seed).randbytes(size)


@asynccontextmanager
async def probe_end(
    open_transport: Callable[[], Transport], view: ByteView, *, seed: int, size: int
) -> AsyncIterator[ProbeEnd]:
    """Opens an end with a transport of its own, and closes both at the end of the context.

    Raises TransferError when the transport can't be opened.
    """
    opening = asyncio.get_running_loop().run_in_executor(None, open_transport)
    try:
        transport = await asyncio.shield(opening)
    except asyncio.CancelledError:
        await asyncio.shield(asyncio.create_task(_close_opened(opening)))
        raise
    try:
        region = await asyncio.to_thread(transport.register, view.memory)
        end = ProbeEnd(transport, view, region=region, seed=seed, size=size)
        with transport.listening():
            yield end
    finally:
        await _close(transport)


async def _close_opened(opening: asyncio.Future[Transport]) -> None:
    """Closes a transport whose opening can't be interrupted, once it is open."""
    with suppress(TransferError):
        await _close(await opening)


async def _close(transport: Transport) -> None:
    """Closes the transport even when the caller is cancelled before a thread is free for it."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, transport.close))


async def probe_loopback(
    transport: Transport,
    region: int,
    pool: Bytes,
    open_end: OpenEnd,
    timeout_s: float,
    parts: Mapping[str, int] | None = None,
) -> None:
    """Checks that `transport` moves bytes out of its `region`, and that others can write into it.

    `pool` is that region; nothing else may use it during the call, and its bytes are restored.
    `parts`: where the pool of every member begins in the region, by the members' names; every
    member's pool is checked. If the process of the other end dies, the probe tries again,
    LOOPBACK_TRIES times in all. Raises TransferError, which names the member where there are
    several.
    """
    parts = parts or {"": 0}
    ends = [*list(parts.values())[1:], pool.nbytes]
    least = min(end - start for start, end in zip(parts.values(), ends, strict=True))
    size = min(PATTERN_BYTES, least // 2)
    own = ProbeEnd(transport, pool, region=region, seed=random.getrandbits(64), size=size)
    for number, (member, start) in enumerate(parts.items()):
        probe = _Loopback(transport, own, region, start, timeout_s)
        try:
            await probe.run(pool, open_end, size, f"loopback-{number}")
        except TransferError as error:
            raise error if len(parts) == 1 else ProbeError(f"{member}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Loopback:
    """The loopback probe of the part of the region that begins with the byte `start`."""

    transport: Transport
    own: ProbeEnd
    region: int
    start: int
    timeout_s: float

    async def run(self, pool: Bytes, open_end: OpenEnd, size: int, name: str) -> None:
        before = pool.read(self.start, 2 * size)
        for attempt in range(1, LOOPBACK_TRIES + 1):
            try:
                async with open_end(f"{name}-{attempt}", random.getrandbits(64), size) as other:
                    await self._both_ways(other)
            except ProbeDiedError as error:
                if attempt == LOOPBACK_TRIES:
                    raise
                log.warning("%s; trying again", error)
            else:
                return
            finally:
                pool.write(self.start, before)

    async def _both_ways(self, other: End) -> None:
        """Runs the probe in both directions, and makes the transport forget the other end."""
        own, start = self.own, self.start
        try:
            with self.transport.listening():
                await _all_or_why(
                    own.exchange(other.metadata, other.seed, self.timeout_s, start=start),
                    other.exchange(
                        own.metadata,
                        own.seed,
                        self.timeout_s,
                        peer_region=self.region,
                        peer_start=start,
                    ),
                )
        finally:
            await outcome(self.transport.disconnect(other.name))


async def _all_or_why(own: Coroutine[None, None, None], other: Coroutine[None, None, None]) -> None:
    """Runs both. If one fails, raises the cause: the other end's death explains our own error."""
    tasks = [asyncio.create_task(own), asyncio.create_task(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        await asyncio.wait(tasks[1:], timeout=DEATH_S)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [error for error in ended if isinstance(error, Exception)]
    for error in sorted(errors, key=lambda e: not isinstance(e, ProbeDiedError)):
        raise error
