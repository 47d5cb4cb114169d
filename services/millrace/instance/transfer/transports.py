"""Opens the transport of a worker's KV."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

from torch import Tensor

from millrace.core.kv.transfer import Incarnation
from millrace.engine.assembly import KvMemory
from millrace.transfer.probe.process import ProbeServer
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.device_memory import check_registers
from millrace.transfer.transport.nixl.environment import transport_environment
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.ranked import RankedTransport
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.remote import serve_agent

log = logging.getLogger(__name__)

#: Elements of the KV pool that are registered once to check that the transport takes its memory.
SOME_ELEMENTS = 1 << 16


async def open_transport(
    stack: AsyncExitStack,
    host: str,
    incarnation: Incarnation,
    memory: KvMemory,
) -> tuple[Transport, ProbeServer]:
    """Opens the transport of requests, and the server that makes the ends of probes."""
    set_environment(host)
    name = transport_name(incarnation)
    probes = await stack.enter_async_context(ProbeServer(name, str(memory.storage.device)))
    some = Memory.of_tensor(memory.storage.view(-1)[:SOME_ELEMENTS])
    log.info(await asyncio.to_thread(check_registers, f"{name}-registers", some))
    transport = RankedTransport(NixlTransport(name))  # peers may have several ranks
    stack.push_async_callback(asyncio.to_thread, transport.close)
    return transport, probes


def serve_rank(pipe: Connection, storage: Callable[[], Tensor]) -> None:
    """Serves the transport of a rank's KV pool to rank 0, in the rank's process (`Beside`)."""
    serve_agent(pipe, NixlTransport, lambda: Memory.of_tensor(storage()))


def set_environment(host: str) -> None:
    """Sets the transports' environment variables that the user has not set."""
    for name, value in transport_environment(host).items():
        os.environ.setdefault(name, value)


def transport_name(incarnation: Incarnation) -> str:
    """Names a worker's incarnation on the transport."""
    return f"{incarnation.id}-{incarnation.generation}"
