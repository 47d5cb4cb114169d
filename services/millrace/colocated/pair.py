"""Runs `millrace colocated --role pair`: prefill and decode in one process with one set of weights.

FlowPrefill section 6.5 (PD-colocation): both instances share a device and its memory; each has its
own pool of KV pages and its own compute thread. The scheduler treats them as two usual instances:
prefill is preempted, batched and chunked as in other instances, and decode runs between its
operators. A request may also be prefilled and decoded in different processes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from millrace.concurrency import stop_event
from millrace.core.config import Config
from millrace.decode.loop import DecodeRole
from millrace.instance.host import WorkerOptions, open_for, serve_role
from millrace.instance.latency import decode_step, decode_table, prefill_latency
from millrace.instance.role import Loaded, Role, WorkerContext
from millrace.instance.vitals import open_vitals
from millrace.prefill.loop import PrefillRole

ROLES: dict[str, Callable[[WorkerContext], Role]] = {"prefill": PrefillRole, "decode": DecodeRole}


async def serve(
    options: WorkerOptions, config: Config, on_ready: Callable[[int], None] | None = None
) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then finishes its requests.

    The instances are named `ID-prefill` and `ID-decode`. Prefill serves on `options.port` and its
    metrics on telemetry.metrics_port, decode on the next ports; `on_ready` gets prefill's port when
    both are registered. Raises the error that ends either instance.
    """
    stop = stop_event()
    name = options.instance_id or f"worker-{uuid.uuid4().hex[:8]}"
    ports: dict[str, int] = {}

    def ready(role: str) -> Callable[[int], None]:
        def note(port: int) -> None:
            ports[role] = port
            if len(ports) == 2 and on_ready is not None:
                on_ready(ports["prefill"])

        return note

    async with AsyncExitStack() as stack:
        trees = [_metrics_beside(config, offset) for offset in range(2)]
        vitals = [
            await stack.enter_async_context(open_vitals(tree.telemetry, options.host))
            for tree in trees
        ]
        engines = await asyncio.to_thread(open_for, options, config, 2)
        latency = await asyncio.to_thread(prefill_latency, engines[0], config.engine)
        table = await asyncio.to_thread(decode_table, engines[1], config.engine)
        step = await asyncio.to_thread(decode_step, engines[1], config.engine, table)
        try:
            async with asyncio.TaskGroup() as group:
                for offset, (role, build) in enumerate(ROLES.items()):
                    own = replace(
                        options,
                        instance_id=f"{name}-{role}",
                        port=options.port and options.port + offset,
                    )
                    loaded = Loaded(
                        role=role,
                        engine=engines[offset],
                        latency=latency,
                        vitals=vitals[offset],
                        decode_step=step,
                        decode_table=table if role == "decode" else None,
                    )
                    group.create_task(
                        serve_role(own, trees[offset], build, loaded, stop, ready(role)), name=role
                    )
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the other instance ended because of it


def _metrics_beside(config: Config, offset: int) -> Config:
    port = config.telemetry.metrics_port
    return replace(config, telemetry=replace(config.telemetry, metrics_port=port and port + offset))
