"""How a worker opens what its KV travels over."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack

from millrace.core.kv.transfer import Incarnation
from millrace.engine.assembly import KvMemory
from millrace.transfer.probe.process import ProbeServer
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.device_memory import check_registers
from millrace.transfer.transport.nixl.environment import transport_environment
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Memory

log = logging.getLogger(__name__)

#: Of the KV pool, registered once to see whether the transport takes its memory.
SOME_ELEMENTS = 1 << 16


async def open_transport(
    stack: AsyncExitStack,
    host: str,
    incarnation: Incarnation,
    memory: KvMemory,
) -> tuple[Transport, ProbeServer]:
    """What requests go over, and where the ends of probes are made meanwhile."""
    set_environment(host)
    name = transport_name(incarnation)
    probes = await stack.enter_async_context(ProbeServer(name, str(memory.storage.device)))
    some = Memory.of_tensor(memory.storage.view(-1)[:SOME_ELEMENTS])
    log.info(await asyncio.to_thread(check_registers, f"{name}-registers", some))
    transport = NixlTransport(name)
    stack.push_async_callback(asyncio.to_thread, transport.close)
    return transport, probes


def set_environment(host: str) -> None:
    """What transports read, where the user has set nothing else."""
    for name, value in transport_environment(host).items():
        os.environ.setdefault(name, value)


def transport_name(incarnation: Incarnation) -> str:
    """What a worker's life is called on the transport."""
    return f"{incarnation.id}-{incarnation.generation}"
