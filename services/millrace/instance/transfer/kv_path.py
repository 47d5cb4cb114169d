"""Proves that an instance can transfer KV, alone and with its peers, before it takes work.

A starting instance moves a pattern through its own transport, out of its KV pool and into it, and
then exchanges patterns with some instances of the roles that it will exchange KV with. One success
is enough: a dead peer must not keep a fleet from growing. If all probes fail, the instance does not
register; it logs each peer and error, and tries again. Every instance answers probes at any time.

Both ends of a probe run in their own processes: a crash in the transport's library fails a probe
and ends no instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from millrace.concurrency import all_or_first_error, cancel
from millrace.core.backoff import Backoff
from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.probe import PeerProbe, ProbeEndpoint
from millrace.telemetry.metrics import Registry
from millrace.transfer.probe.pattern import (
    PATTERN_BYTES,
    End,
    OpenEnd,
    probe_loopback,
)
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.regions import Bytes
from millrace.wire.clients.probe_peer import probe_call
from millrace.wire.clients.scheduler_client import InstanceView, SchedulerUnavailable, get_instances

log = logging.getLogger(__name__)

#: Limit of one exchange of patterns.
EXCHANGE_TIMEOUT_S = 10.0
#: Limit of a whole probe: the peer may have to answer other probes first.
PROBE_TIMEOUT_S = 20.0
#: Probes that an instance answers at once.
ANSWERS_AT_ONCE = 4
#: Peers asked per role.
PEERS_ASKED = 2
#: Time after the first success in which other probes may still end.
OTHERS_S = 1.0
#: Between attempts to reach a peer.
RETRY = Backoff(1.0, 30.0)

#: The roles that an instance exchanges KV with, by its role. Prefill sends KV to decode instances
#: and KVP workers; rings of prefill instances exchange blocks; decode sends queries to KVP workers.
_EXCHANGES = {
    "prefill": ("decode", "prefill", "kvp"),
    "decode": ("prefill", "kvp"),
    "kvp": ("prefill", "decode", "mixed"),
    "mixed": ("kvp",),
}


class KvPath:
    """Sends and answers the probes of one instance; `probe_servicer.py` receives probes."""

    def __init__(
        self,
        incarnation: Incarnation,
        open_end: OpenEnd,
        registry: Registry,
        retry: Backoff = RETRY,
    ) -> None:
        """`open_end` opens an end of a probe with memory of the same kind as the KV pool."""
        self._life = incarnation
        self._open_end = open_end
        self._retry = retry
        self._numbers = itertools.count(1)
        self._answers = asyncio.Semaphore(ANSWERS_AT_ONCE)
        self._seconds = registry.histogram(
            "millrace_transfer_probe_seconds", "time of a successful probe of the KV path", ["of"]
        )
        self._errors = registry.counter(
            "millrace_transfer_probe_errors_total", "probes of the KV path that failed", ["of"]
        )

    async def check_own(
        self, transport: Transport, region: int, pools: Bytes, parts: Mapping[str, int]
    ) -> None:
        """Moves bytes out of every member's KV pool and into it. The pools must be unused; they are
        unchanged.

        `region`: of the pools, which follow one another in `pools`, at the `transport`. `parts`:
        where each member's begins. Raises TransferError.
        """
        with self._timed("loopback"):
            await probe_loopback(
                transport, region, pools, self._open_end, EXCHANGE_TIMEOUT_S, parts
            )

    async def reach_peers(self, scheduler: str, role: str) -> None:
        """Probes peers again and again; returns when a peer passed or there is no peer."""
        for failures in itertools.count():
            try:
                if await self._reach_one(await get_instances(scheduler), role):
                    return
            except SchedulerUnavailable as error:
                log.warning("%s; retrying", error)
            await asyncio.sleep(self._retry.pause_s(failures))

    async def probe_all(self, scheduler: str, instance_ids: Sequence[str]) -> list[PeerProbe]:
        """Probes these instances, one after the other. Raises SchedulerUnavailable."""
        there = {one.id: one for one in await get_instances(scheduler)}
        found = []
        for instance_id in instance_ids:
            started_s, error = time.monotonic(), ""
            try:
                if instance_id not in there:
                    raise TransferError(f"no instance {instance_id} is registered")
                await self._probe(there[instance_id].address)
            except TransferError as failure:
                error = str(failure)
            seconds = time.monotonic() - started_s
            found.append(PeerProbe(instance_id=instance_id, error=error, seconds=seconds))
        return found

    async def _reach_one(self, instances: list[InstanceView], role: str) -> bool:
        asked = chosen_peers(instances, role, self._life.id)
        if not asked:
            return True
        probes = {asyncio.create_task(self._probe(peer.address)): peer for peer in asked}
        try:
            failures = await _failures(probes)
        finally:
            await cancel(*probes)
        passed = len(asked) - len(failures)
        if passed:
            for failure in failures:
                log.warning("no KV travels to and from %s", failure)
            log.info("KV travels to and from %d of %d peers", passed, len(asked))
            return True
        log.error(
            "not ready: KV can't travel between %s and any of the %d asked: %s; trying again",
            self._life.id,
            len(asked),
            "; ".join(failures),
        )
        return False

    async def _probe(self, address: str) -> None:
        """Probes the instance at `address`. Raises TransferError."""
        with self._timed("peer"):
            async with (
                self._end() as end,
                probe_call(address, self._life, endpoint(end), timeout_s=PROBE_TIMEOUT_S) as call,
            ):
                theirs = await call.endpoint()
                await all_or_first_error(
                    [
                        end.exchange(theirs.agent_metadata, theirs.seed, EXCHANGE_TIMEOUT_S),
                        call.verdict(),
                    ]
                )
                await call.end()

    @asynccontextmanager
    async def answering(self, asker: str) -> AsyncIterator[End]:
        """Opens an end for the probe of `asker`, in its turn. Raises TransferError on failure."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._answers)
            try:
                end = await stack.enter_async_context(self._end())
            except TransferError as error:
                log.warning("no end for the probe of %s: %s", asker, error)
                raise
            yield end

    async def answer(self, end: End, theirs: ProbeEndpoint, asker: str) -> str:
        """Exchanges patterns as the other side of `_probe`. Returns the error here; empty: none."""
        try:
            await end.exchange(theirs.agent_metadata, theirs.seed, EXCHANGE_TIMEOUT_S)
        except TransferError as error:
            log.warning("the KV path from %s, which starts: %s", asker, error)
            return str(error)
        return ""

    def _end(self) -> AbstractAsyncContextManager[End]:
        return self._open_end(f"probe-{next(self._numbers)}", random.getrandbits(64), PATTERN_BYTES)

    @contextmanager
    def _timed(self, of: str) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        except TransferError:
            self._errors.labels(of).inc()
            raise
        self._seconds.labels(of).observe(time.monotonic() - start_s)


def chosen_peers(instances: list[InstanceView], role: str, own_id: str) -> list[InstanceView]:
    """Draws some instances that an instance of `role` exchanges KV with, by chance.

    Draining instances and this instance's earlier incarnations are not drawn.
    """
    there = [one for one in instances if not one.draining and one.id != own_id]
    chosen: list[InstanceView] = []
    for wanted in _EXCHANGES.get(role, ()):
        alike = [one for one in there if one.role == wanted]
        chosen += random.sample(alike, min(PEERS_ASKED, len(alike)))
    return chosen


async def _failures(probes: dict[asyncio.Task[None], InstanceView]) -> list[str]:
    """Waits for the first success and `OTHERS_S` more, or for all; returns the failures."""
    running: set[asyncio.Task[None]] = set(probes)
    passed = False
    while running and not passed:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        passed = any(probe.exception() is None for probe in done)
    if running:
        await asyncio.wait(running, timeout=OTHERS_S)
    failures = []
    for probe, peer in probes.items():
        error = probe.exception() if probe.done() else "no answer so far"
        if isinstance(error, BaseException) and not isinstance(error, TransferError):
            raise error
        if error is not None:
            failures.append(f"{peer.role} {peer.id} at {peer.address}: {error}")
    return failures


def endpoint(end: End) -> ProbeEndpoint:
    """Builds the message that describes this end to the other end."""
    return ProbeEndpoint(agent_metadata=end.metadata, seed=end.seed)
