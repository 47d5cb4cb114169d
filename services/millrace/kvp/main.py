"""Runs `millrace kvp`: builds a KVP worker and serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace.concurrency import stop_event
from millrace.core.config import Config
from millrace.engine.assembly import open_kv_only
from millrace.instance.host import WorkerOptions, log_memory, serve_instance
from millrace.instance.role import Instance
from millrace.instance.vitals import open_vitals
from millrace.kvp.role import KvpRole


async def serve(
    options: WorkerOptions, config: Config, on_ready: Callable[[int], None] | None = None
) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then lets the requests with shards here finish."""
    stop = stop_event()
    async with open_vitals(config.telemetry, options.host) as vitals:
        memory = await asyncio.to_thread(
            open_kv_only, options.model, config.engine, options.revision
        )
        log_memory("a KV pool alone for", memory)
        instance = Instance(
            role=KvpRole.name,
            memory=memory,
            vitals=vitals,
            build=lambda context: KvpRole(context, memory),
        )
        await serve_instance(options, config, instance, stop, on_ready)
