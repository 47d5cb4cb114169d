"""Opens the transport of a worker's KV."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

from torch import Tensor

from millrace.core.incarnation import Incarnation
from millrace.engine.assembly import KvMemory
from millrace.transfer.probe.process import ProbeServer
from millrace.transfer.push.checksums import require_readable
from millrace.transfer.push.messages import TO_RECEIVER, TO_SENDER
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.byte_window import ByteWindow
from millrace.transfer.transport.checked import CheckedTransport
from millrace.transfer.transport.device_copies import COPIES
from millrace.transfer.transport.device_memory import check_registers
from millrace.transfer.transport.joined import JoinedTransport
from millrace.transfer.transport.nixl.environment import transport_environment
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Bytes, JoinedBytes, Memory
from millrace.transfer.transport.remote import RemoteAgent, serve_agent

log = logging.getLogger(__name__)

#: Elements of the KV pool that are registered once to check that the transport takes its memory.
SOME_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class KvTransport:
    """The transport of an instance's KV. `pools`: the bytes of all members' KV, in the order of
    `KvLayout.member_pools`."""

    transport: Transport
    pools: Bytes


async def open_transport(
    stack: AsyncExitStack,
    host: str,
    incarnation: Incarnation,
    memory: KvMemory,
    *,
    checksums: bool,
    on_corrupt: Callable[[str], None],
) -> tuple[KvTransport, ProbeServer]:
    """Opens the transport of requests, and the server that makes the ends of probes.

    `on_corrupt` gets the instance of every message that was not as it was sent
    (`CheckedTransport`). Raises ConfigError for `checksums` of a pool that the host can't read.
    """
    if checksums:
        require_readable(Memory.of_tensor(memory.storage), memory.layout)
    set_environment(host)
    name = transport_name(incarnation)
    probes = await stack.enter_async_context(ProbeServer(name, str(memory.storage.device)))
    some = Memory.of_tensor(memory.storage.view(-1)[:SOME_ELEMENTS])
    log.info(await asyncio.to_thread(check_registers, f"{name}-registers", some))
    opened = await asyncio.to_thread(kv_transport, name, memory)
    stack.push_async_callback(asyncio.to_thread, opened.transport.close)
    transport = CheckedTransport(
        opened.transport,
        checks=checksums,
        summed=(TO_RECEIVER, TO_SENDER),
        on_corrupt=lambda peer: on_corrupt(peer.rpartition("-")[0]),
    )
    return replace(opened, transport=transport), probes


def kv_transport(name: str, memory: KvMemory) -> KvTransport:
    """Opens an agent of this process, and one in every member that has a pool of its own. Peers may
    have several members in any case.

    Raises TransferError, with the member that has opened none.
    """
    pools = ByteWindow(memory.storage)
    if memory.members is None:
        return KvTransport(JoinedTransport(NixlTransport(name, COPIES)), pools)
    agents = [
        RemoteAgent(pipe, member, f"{name}.{number}")
        for number, (member, pipe) in enumerate(memory.members.transports.items(), start=1)
    ]
    memories = [pools.memory, *(agent.pool.memory for agent in agents)]
    transport = JoinedTransport(NixlTransport(name, COPIES), agents, memories)
    return KvTransport(transport, JoinedBytes([pools, *(agent.pool for agent in agents)]))


def serve_member(pipe: Connection, storage: Callable[[], Tensor], rank: int) -> None:
    """Serves the transport of a member's KV pool to the leader, in the member (`Beside`)."""
    serve_agent(pipe, partial(NixlTransport, copies=COPIES), lambda: ByteWindow(storage()))


def set_environment(host: str) -> None:
    """Sets the transports' environment variables that the user has not set."""
    for name, value in transport_environment(host).items():
        os.environ.setdefault(name, value)


def transport_name(incarnation: Incarnation) -> str:
    """Names a worker's incarnation on the transport."""
    return f"{incarnation.id}-{incarnation.generation}"
