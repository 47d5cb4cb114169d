"""Runs `millrace stage`: later stages of instances on other hosts, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from millrace.concurrency import stop_event
from millrace.core.config import Config
from millrace.engine.assembly import resolve_device
from millrace.engine.parallel.member_pools import services
from millrace.engine.sizing import compute_threads
from millrace.instance.stages.remote.servicer import StageHostServicer, StageRoom
from millrace.instance.transfer.transports import serve_member, set_environment
from millrace.instance.vitals import open_vitals
from millrace.model_folder import resolve_model
from millrace.wire.address import host_port
from millrace.wire.options import MAX_STAGE_MESSAGE_BYTES
from millrace.wire.server import add_health, bind, create_server

log = logging.getLogger(__name__)


async def serve(
    model: str,
    config: Config,
    host: str,
    port: int,
    drain_timeout_s: float,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; then waits for the stage that runs to end with its instance.

    Raises ModelError, ConfigError and BindError.
    """
    stop = stop_event()
    device = resolve_device(config.engine.device)
    set_environment(host)  # which the stages inherit
    async with open_vitals(config.telemetry, host) as vitals:  # alive during a download
        room = StageRoom(
            folder=await asyncio.to_thread(resolve_model, model),
            host=host,
            device=device,
            threads=compute_threads(config.engine),
            services=services(serve_member),
        )
        server = create_server(max_message_bytes=MAX_STAGE_MESSAGE_BYTES)
        servicer = StageHostServicer(room)
        servicer.add_to(server)
        health = add_health(server, ["millrace.v1.StageHost"])
        bound = bind(server, host, port)
        await server.start()
        await health.set_serving(True)
        vitals.ready = lambda: not stop.is_set()
        log.info("stages of %s can run at %s, on %s", room.folder, host_port(host, bound), device)
        if on_ready is not None:
            on_ready(bound)
        await stop.wait()
        await health.set_serving(False)
        if servicer.runs:
            log.info("waits for %s, whose stage runs here", servicer.runs)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_timeout_s):
                await servicer.idle()
        await server.stop(None)
