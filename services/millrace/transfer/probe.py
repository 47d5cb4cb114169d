"""Whether bytes really travel: either side writes a pattern to the other and checks what came.

The end that a peer writes to is a transport of its own, made for one probe and closed after it.
What a probe leaves undone can't touch what requests go over, and all that it held goes with it:
the registered buffer, the peer, whatever was in flight.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from millrace.core.errors import TransferError
from millrace.transfer.memory import Memory
from millrace.transfer.runs import Runs
from millrace.transfer.transport import Transport, outcome

#: Bytes of a pattern between instances, the same at both. Large enough that UCX moves it as it
#: moves KV, and not as it moves short messages.
PATTERN_BYTES = 256 << 10

#: First byte of a probe's notification, by which a transport tells its subscribers apart.
CHANNEL = 9


class ProbeError(TransferError):
    """The bytes did not come, or others did."""


class ByteView(Protocol):
    """Memory that a transport may write to, read and written from the host."""

    @property
    def memory(self) -> Memory: ...

    def read(self, start: int, count: int) -> bytes: ...

    def write(self, start: int, data: bytes) -> None: ...


class ProbeEnd:
    """One of the two. It wants the pattern of `seed`; belongs to an event loop.

    It sends from the first `size` bytes of its region and gets what comes in the next `size`.
    """

    def __init__(
        self, transport: Transport, view: ByteView, *, region: int, seed: int, size: int
    ) -> None:
        """`view`: of the transport's `region`, which is registered already."""
        self.name = transport.name
        self.seed = seed
        self.metadata = transport.metadata()
        self._transport = transport
        self._view = view
        self._region = region
        self._size = size
        self._arrived: Future[None] = Future()
        self._arrived.set_running_or_notify_cancel()  # who no longer waits must not cancel it
        transport.subscribe(CHANNEL, self._hear)

    async def exchange(
        self, metadata: bytes, seed: int, timeout_s: float, *, peer_region: int = 0
    ) -> None:
        """Writes the pattern of `seed` to the end that `metadata` describes, and checks our own.

        Raises ProbeError saying what did not happen, TransferError if the transport says so. Leaves
        the peer to the transport.
        """
        doing = "connecting to the peer"
        try:
            async with asyncio.timeout(timeout_s):
                peer = await outcome(self._transport.connect(metadata))
                doing = "writing to the peer"
                self._view.write(0, pattern(seed, self._size))
                runs = Runs.of(0, self._size, self._size)
                written = self._transport.write(
                    peer, runs, bytes([CHANNEL]), region=self._region, peer_region=peer_region
                )
                await outcome(written)
                doing = "waiting for what the peer writes"
                await outcome(self._arrived)
        except TimeoutError:
            raise ProbeError(f"{doing} did not end within {timeout_s:g} s") from None
        self._check()

    def _hear(self, peer: str, payload: bytes) -> None:
        """On the transport's thread."""
        if not self._arrived.done():
            self._arrived.set_result(None)

    def _check(self) -> None:
        found, wanted = self._view.read(self._size, self._size), pattern(self.seed, self._size)
        if found != wanted:
            first = next(
                i for i, pair in enumerate(zip(found, wanted, strict=True)) if len({*pair}) > 1
            )
            raise ProbeError(f"byte {first} of {self._size} is not what the peer wrote")


def pattern(seed: int, size: int) -> bytes:
    """The same bytes for the same seed, in every process."""
    return random.Random(seed).randbytes(size)


@asynccontextmanager
async def probe_end(
    open_transport: Callable[[], Transport], view: ByteView, *, seed: int, size: int
) -> AsyncIterator[ProbeEnd]:
    """An end with a transport of its own, which is closed with all it holds at the end.

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
    """What is being opened can't be interrupted, and must not be forgotten."""
    with suppress(TransferError):
        await _close(await opening)


async def _close(transport: Transport) -> None:
    """Whoever is cancelled meanwhile, also before a thread is free for it, it is closed."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, transport.close))


async def probe_loopback(
    transport: Transport,
    region: int,
    pool: ByteView,
    open_transport: Callable[[], Transport],
    view: ByteView,
    timeout_s: float,
) -> None:
    """Whether `transport` moves bytes out of its `region` and others can write into it.

    `pool` is that region, which nobody may use meanwhile; it is left as it was. `view`: memory for
    the other end, twice PATTERN_BYTES. Raises TransferError.
    """
    size = min(PATTERN_BYTES, pool.memory.nbytes // 2)
    before = pool.read(0, 2 * size)
    seeds = random.getrandbits(64), random.getrandbits(64)
    async with probe_end(open_transport, view, seed=seeds[0], size=size) as other:
        own = ProbeEnd(transport, pool, region=region, seed=seeds[1], size=size)
        try:
            with transport.listening():
                await asyncio.gather(
                    own.exchange(other.metadata, other.seed, timeout_s),
                    other.exchange(own.metadata, own.seed, timeout_s, peer_region=region),
                )
        finally:
            await outcome(transport.disconnect(other.name))
            pool.write(0, before)
