"""Assembles the scheduler service: server, loop, recorder, metrics, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.core.config import Config
from millrace.scheduler.loop import SchedulerLoop
from millrace.scheduler.recorder import Recorder
from millrace.scheduler.recording import Recording
from millrace.scheduler.servicer import SchedulerServicer
from millrace.state.open import open_store
from millrace.telemetry.metrics import Registry
from millrace.telemetry.metrics_server import serve_metrics
from millrace.wire.address import host_port
from millrace.wire.server import add_health, bind, create_server

log = logging.getLogger(__name__)

#: The time after the drain in which streams end and the last states are written.
CLOSE_S = 2.0


async def serve(
    config: Config,
    *,
    host: str,
    port: int,
    on_ready: Callable[[int], None] | None = None,
    record: Path | None = None,
) -> None:
    """Runs the scheduler until SIGTERM or SIGINT, then lets running requests finish.

    `on_ready` gets the port of the server; `record` names the file to which the run is written for
    `millrace sim replay`. Raises MillraceError if the server can't listen, and every error that
    ends the loop: a scheduler that can't decide must not seem alive.
    """
    stop = asyncio.Event()
    registry = Registry()
    async with contextlib.AsyncExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
            stack.callback(asyncio.get_running_loop().remove_signal_handler, number)
        store = open_store(config.store)
        stack.push_async_callback(store.close)
        recorder = Recorder(store)
        recording = None
        if record is not None:
            recording = Recording(record, config.scheduler)
            stack.callback(recording.close)
        loop = SchedulerLoop(
            config.scheduler, recorder, registry, recording=recording, weights=config.weights
        )
        if config.telemetry.metrics_port:
            metrics = await serve_metrics(
                config.telemetry.metrics_port,
                lambda: not loop.draining,
                registry=registry,
                host=host,
            )
            stack.push_async_callback(metrics.close)
        server = create_server()
        SchedulerServicer(loop).add_to(server)
        health = add_health(server, ["millrace.v1.Scheduler"])
        bound = bind(server, host, port)
        work: asyncio.Future[Any] = asyncio.gather(loop.run(), loop.tick(), recorder.run())
        stack.push_async_callback(_end, work)
        await server.start()
        stack.push_async_callback(server.stop, CLOSE_S)
        await health.set_serving(True)
        log.info("the scheduler serves on %s", host_port(host, bound))
        if on_ready is not None:
            on_ready(bound)
        stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            stopped.cancel()
            await work  # raises the task's error
        await health.set_serving(False)
        await _drain(loop, recorder, config.scheduler.drain_timeout_s)


async def _drain(loop: SchedulerLoop, recorder: Recorder, timeout_s: float) -> None:
    """Takes no new request, waits for the requests in flight, ends the streams."""
    loop.draining = True
    log.info("draining: %d requests are in flight", len(loop.machine.requests))
    try:
        await asyncio.wait_for(loop.idle.wait(), timeout_s)
    except TimeoutError:
        log.warning("%d requests were still in flight", len(loop.machine.requests))
    loop.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(recorder.flushed(), CLOSE_S)


async def _end(work: asyncio.Future[Any]) -> None:
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
