"""Assembles the scheduler service: server, lease, loop, recorder, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from millrace.concurrency import cancel, stop_signals
from millrace.core.config import Config
from millrace.scheduler.leadership import Leadership
from millrace.scheduler.loop import SchedulerLoop
from millrace.scheduler.observe.outcome_log import OutcomeLog
from millrace.scheduler.observe.recording import Recording
from millrace.scheduler.observe.traces import SchedulerTraces
from millrace.scheduler.recorder import Recorder
from millrace.scheduler.servicer import SchedulerServicer
from millrace.scheduler.succession import Estate, configured
from millrace.state.leases import Lease
from millrace.state.open import open_leases, open_outcomes, open_store
from millrace.telemetry.metrics import Registry
from millrace.telemetry.metrics_server import serve_metrics
from millrace.telemetry.otlp.exports import Exports
from millrace.telemetry.tracing.tracer import open_tracer
from millrace.wire.address import host_port, with_port
from millrace.wire.server import add_health, bind, create_server

log = logging.getLogger(__name__)

#: The time in which the last states are written, and in which streams end.
CLOSE_S = 2.0


async def serve(
    config: Config,
    *,
    host: str,
    port: int,
    advertise: str = "",
    on_ready: Callable[[int], None] | None = None,
    record: Path | None = None,
) -> None:
    """Runs the scheduler until SIGTERM, SIGINT or SIGHUP, then hands over to the next leader.

    It leads when no other scheduler of the same store does; until then it stands by. Peers reach it
    at `advertise` (host:port, or the host alone; empty: where it listens). `on_ready` gets the port
    of the server, as soon as it leads or stands by; `record` names the file to which the run is
    written for `millrace sim replay`. Raises MillraceError if the server can't listen,
    LeadershipLost when another scheduler leads, and every error that ends the loop: a scheduler
    that can't decide must not seem alive.
    """
    registry = Registry()
    async with contextlib.AsyncExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        leases = open_leases(config.store)
        stack.push_async_callback(leases.close)
        if config.telemetry.metrics_port:
            metrics = await serve_metrics(
                config.telemetry.metrics_port,
                lambda: not stop.is_set(),
                registry=registry,
                host=host,
            )
            stack.push_async_callback(metrics.close)
        server = create_server()
        servicer = SchedulerServicer(
            lambda: leadership.leader, lambda seen: leadership.outrun(seen)
        )
        servicer.add_to(server)
        health = add_health(server, ["millrace.v1.Scheduler"])
        bound = bind(server, host, port)
        address = with_port(advertise or host, bound)
        leadership = Leadership(leases, address, config.scheduler)
        Exports(config.telemetry, "scheduler", f"scheduler-{address}", registry).start_in(stack)
        await server.start()
        stack.push_async_callback(server.stop, CLOSE_S)
        log.info("the scheduler serves on %s", host_port(host, bound))
        lease = await leadership.try_to_lead()
        if lease is None:
            log.info("it stands by; %s leads", leadership.leader or "no scheduler")
            await health.set_serving(True)
            if on_ready is not None:
                on_ready(bound)
            on_ready, lease = None, await _stand_by(leadership, stop)
        if lease is None:
            return
        async with _leading(config, leadership, lease, registry, record) as (loop, work):
            servicer.lead(loop)
            await health.set_serving(True)
            if on_ready is not None:
                on_ready(bound)
            stopped = asyncio.ensure_future(stop.wait())
            await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                stopped.cancel()
                await work  # raises the task's error
            await health.set_serving(False)


@contextlib.asynccontextmanager
async def _leading(
    config: Config,
    leadership: Leadership,
    lease: Lease,
    registry: Registry,
    record: Path | None,
) -> AsyncIterator[tuple[SchedulerLoop, asyncio.Future[Any]]]:
    """Runs the loop and the renewals of the lease; hands over at the end of the block."""
    log.info("it leads: epoch %d", lease.epoch)
    async with contextlib.AsyncExitStack() as stack:
        store = open_store(config.store)
        stack.push_async_callback(store.close)
        recorder = Recorder(store, may_write=leadership.certain)
        recording = None
        if record is not None:
            zero_unix_s = round(time.time() - time.monotonic(), 3)
            recording = Recording(record, config.scheduler, zero_unix_s)
            stack.callback(recording.close)
        name = f"scheduler-{os.getpid()}-{lease.epoch}"
        tracer = open_tracer(config.telemetry, "scheduler", name, registry)
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        loop = SchedulerLoop(
            config.scheduler,
            recorder,
            registry,
            recording=recording,
            weights=config.weights,
            epoch=lease.epoch,
            estate=Estate.decode(lease.note, configured(config)),
        )
        loop.trace(SchedulerTraces(tracer))
        parts = [
            loop.run(),
            loop.tick(),
            recorder.run(),
            leadership.keep(loop.note, loop.note_changed),
        ]
        if (outcomes := _outcome_log(config, loop)) is not None:
            stack.push_async_callback(outcomes.close)
            parts.append(outcomes.run())
        work: asyncio.Future[Any] = asyncio.gather(*parts, loop.end_takeover())
        stack.push_async_callback(_end, work)
        yield loop, work
        await _hand_over(loop, recorder, leadership)


def _outcome_log(config: Config, loop: SchedulerLoop) -> OutcomeLog | None:
    """Follows the requests for `millrace report`, if the store can keep what becomes of them."""
    most = config.telemetry.report_requests
    store = open_outcomes(config.store, config.scheduler.group) if most else None
    if store is None:
        return None
    outcomes = OutcomeLog(store, loop.machine, loop.load, most=most)
    loop.watching.append(outcomes.saw)
    return outcomes


async def _stand_by(leadership: Leadership, stop: asyncio.Event) -> Lease | None:
    """Waits until this scheduler leads; returns None if it is stopped before."""
    leads = asyncio.create_task(leadership.lead())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([leads, stopped], return_when=asyncio.FIRST_COMPLETED)
    await cancel(leads, stopped)
    if leads.cancelled():
        return None
    lease = leads.result()
    if stop.is_set():
        await leadership.release()
        return None
    return lease


async def _hand_over(loop: SchedulerLoop, recorder: Recorder, leadership: Leadership) -> None:
    """Writes the last states, frees the lease and ends the streams: another scheduler goes on.

    Instances keep their work, and proxies their requests, until it does.
    """
    log.info("it hands over; %d requests are in flight", len(loop.machine.requests))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await recorder.flushed()
    await leadership.release(loop.note())
    loop.close()


async def _end(work: asyncio.Future[Any]) -> None:
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
