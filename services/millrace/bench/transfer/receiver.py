"""The receiving process of `millrace bench transfer`, and its proxy in the sending process."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from millrace.bench.transfer.bare import BareReceiver
from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.core.kv.layout import KvLayout
from millrace.engine.kv.pool import KvPool
from millrace.instance.transfer.kv_servicer import KvReceiverServicer
from millrace.transfer.push.control import ReceiveCallbacks
from millrace.transfer.push.receive.manager import ReceiveManager
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Memory
from millrace.wire.server import bind, create_server

MIB = 1 << 20
#: Staging of each backend of the buffered receiver: a slot holds 1 MiB, 256 tokens of a layer.
BUFFER_BYTES = 8 * MIB
#: The receivers' settings. `checked` is buffer-free, with checksums.
MODES = {
    "buffer-free": TransferConfig(),
    "buffered": TransferConfig(buffer_bytes=BUFFER_BYTES),
    "checked": TransferConfig(kv_checksum="on"),
}
ANSWER_TIMEOUT_S = 60.0

#: A future request: its id, its pages and its tokens.
Expected = tuple[str, list[int], int]


class Receiver:
    """The receiving process, as the sender sees it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.addresses: dict[str, str] = self.hear()
        self.bare_metadata: bytes
        self.pool: Memory
        self.bare_metadata, self.pool = self.hear()

    def hear(self) -> Any:  # noqa: ANN401 - any answer of the child
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise TransferError("the receiving process did not answer in time")
        return self._pipe.recv()

    def ask(self, *command: object) -> Any:  # noqa: ANN401
        """Sends a command of `_Commands`: a method's name and its arguments."""
        self._pipe.send(command)
        return self.hear()


@contextmanager
def receiver_process(layout: KvLayout) -> Iterator[Receiver]:
    """Starts a process with a receiver of each mode, until the block ends."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, layout), daemon=True)
    process.start()
    try:
        yield Receiver(ours)
    finally:
        process.kill()
        process.join()


def _receive(pipe: Connection, layout: KvLayout) -> None:
    uvloop.run(_serve(pipe, layout))


class _Commands:
    """The commands of the sending process."""

    def __init__(self, pool: Memory) -> None:
        self.managers: dict[str, ReceiveManager] = {}
        self.landed: asyncio.Queue[str] = asyncio.Queue()
        self.bare = BareReceiver(pool)

    async def expect(self, mode: str, requests: Sequence[Expected], in_flight: int) -> None:
        """Admits the first `in_flight` requests; a later request takes the pages of a landed
        request.
        """
        for request in requests[:in_flight]:
            self.managers[mode].admit(*request)
        self._serving = asyncio.create_task(self._serve(mode, requests, in_flight))

    async def served(self) -> None:
        """Returns when all expected requests have landed and were released."""
        await self._serving

    async def poll(self, wanted: bool) -> None:
        self.bare.poll(wanted)

    async def _serve(self, mode: str, requests: Sequence[Expected], in_flight: int) -> None:
        numbers = {request: number for number, (request, _, _) in enumerate(requests)}
        for _ in requests:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self.landed.get()
            if answer not in numbers:
                raise TransferError(answer)
            await self.managers[mode].release(answer)
            follower = numbers[answer] + in_flight
            if follower < len(requests):
                self.managers[mode].admit(*requests[follower])


async def _serve(pipe: Connection, layout: KvLayout) -> None:
    """Reports the addresses of the receivers and the bare agent, then obeys."""
    pool = KvPool(layout).storage.fill_(1)  # so that no page is touched for the first time later
    memory = Memory.of_tensor(pool)
    commands = _Commands(memory)
    addresses: dict[str, str] = {}
    servers = []
    for mode, config in MODES.items():
        server = create_server()
        commands.managers[mode] = ReceiveManager(
            transport=NixlTransport(f"bench-{mode}-{os.getpid()}"),
            layout=layout,
            storage=pool,
            identity=(mode, 1),
            config=config,
            callbacks=ReceiveCallbacks(
                on_first_tokens=lambda request_id, message: None,
                on_landed=commands.landed.put_nowait,
                on_prefix=lambda request_id, attempt, tokens: None,
                on_failed=lambda request_id, why, attempt, kept: commands.landed.put_nowait(
                    f"{request_id}: {why}"
                ),
            ),
        )
        KvReceiverServicer(commands.managers[mode]).add_to(server)
        addresses[mode] = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
        await server.start()
        servers.append(server)
    pipe.send(addresses)
    pipe.send((commands.bare.metadata, memory))
    while True:
        name, *arguments = await asyncio.to_thread(pipe.recv)
        pipe.send(await getattr(commands, name)(*arguments))
