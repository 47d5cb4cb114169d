"""A decode-like node (pool, ReceiveManager, gRPC service) and a prefill-like one (SendManager).

Either may run in this process or in a child of its own; the transport is NIXL in both.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

import grpc
import numpy as np

from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.core.kv.layout import KvLayout
from millrace.core.token_events import FinishedPrefill, FirstToken
from millrace.instance.transfer.kv_servicer import KvReceiverServicer
from millrace.transfer.push.control import ReceiveCallbacks
from millrace.transfer.push.receive.manager import ReceiveManager
from millrace.transfer.push.send.manager import SendManager, SendSession
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.wire.clients.kv_peer import KvPeers
from millrace.wire.server import bind, create_server
from support.deadlines import HANG_S
from support.transfer_peers import ChildPipe

_numbers = itertools.count(1)


def layout(
    *,
    page_tokens: int = 16,
    pages: int = 64,
    heads: tuple[int, int] = (0, 4),
    model_hash: str = "model-a",
    layers: int = 3,
    layer_start: int = 0,
    model_layers: int = 0,
) -> KvLayout:
    """A small pool: 4 heads of the model, of which `heads` = (first, count) are here."""
    return KvLayout(
        model_hash=model_hash,
        dtype="float32",
        num_layers=layers,
        num_kv_heads=4,
        head_dim=8,
        page_tokens=page_tokens,
        head_start=heads[0],
        head_count=heads[1],
        num_pages=pages,
        layer_start=layer_start,
        model_layers=model_layers,
    )


class Pool:
    """A KV pool in NumPy, float32; the children need not import torch."""

    def __init__(self, made: KvLayout) -> None:
        self.array = np.zeros(
            (
                made.num_layers,
                made.num_pages,
                2,
                made.head_count,
                made.page_tokens,
                made.head_dim,
            ),
            dtype=np.float32,
        )

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def get_device(self) -> int:
        return -1

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous


def expected_kv(made: KvLayout, seed: int, tokens: int) -> np.ndarray:
    """Returns the KV of a prompt, float32 [layers, 2, heads of the model, tokens, head_dim]."""
    shape = (made.num_layers, 2, made.num_kv_heads, tokens, made.head_dim)
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def fill(pool: Pool, made: KvLayout, pages: list[int], kv: np.ndarray) -> None:
    """Writes a prompt's KV into its pages, token by token: the oracle's way."""
    array = pool.array
    for token in range(kv.shape[3]):
        page, row = pages[token // made.page_tokens], token % made.page_tokens
        array[:, page, :, :, row] = kv[:, :, made.head_start : made.head_end, token]


def read(pool: Pool, made: KvLayout, pages: list[int], tokens: int) -> np.ndarray:
    """Returns the KV in a request's pages, float32 [layers, 2, heads here, tokens, head_dim]."""
    rows = pool.array[:, pages]  # [layers, pages, 2, heads, page_tokens, dim]
    flat = rows.transpose(0, 2, 3, 1, 4, 5).reshape(
        made.num_layers, 2, made.head_count, -1, made.head_dim
    )
    return flat[:, :, :, :tokens]


def pages_of(made: KvLayout, tokens: int, seed: int) -> list[int]:
    """Returns pages for a prompt, in random order."""
    order = np.random.default_rng(seed).permutation(made.num_pages)
    return order[: made.pages_for(tokens)].tolist()


class ReceiverNode:
    """The transfer parts of a decode instance. `events` lists the calls of its callbacks."""

    def __init__(
        self, made: KvLayout, config: TransferConfig, *, node_id: str = "decode-0", generation=7
    ) -> None:
        self.layout = made
        self.pool = Pool(made)
        self.identity = (node_id, generation)
        self.transport = NixlTransport(f"{node_id}-{os.getpid()}-{next(_numbers)}")
        self.events: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self.manager = ReceiveManager(
            transport=self.transport,
            layout=made,
            storage=self.pool,
            identity=self.identity,
            config=config,
            callbacks=ReceiveCallbacks(
                on_first_tokens=lambda i, m: self.events.put_nowait(
                    ("first", i, str([t.token_id for t in m.first_tokens]))
                ),
                on_landed=lambda i: self.events.put_nowait(("landed", i)),
                on_prefix=lambda i, attempt, tokens: None,
                on_failed=lambda i, message, *kept: self.events.put_nowait(("failed", i, message)),
            ),
        )
        self.server: grpc.aio.Server = create_server()
        KvReceiverServicer(self.manager).add_to(self.server)
        self.address = f"127.0.0.1:{bind(self.server, '127.0.0.1', 0)}"

    async def start(self) -> ReceiverNode:
        await self.server.start()
        return self

    async def event(self, timeout_s: float = HANG_S) -> tuple[str, ...]:
        async with asyncio.timeout(timeout_s):
            return await self.events.get()

    async def close(self) -> None:
        await self.server.stop(grace=None)
        await self.manager.close()
        await asyncio.to_thread(self.transport.close)


class SenderNode:
    """The transfer parts of a prefill instance."""

    def __init__(
        self, made: KvLayout, config: TransferConfig, *, node_id: str = "prefill-0", generation=5
    ) -> None:
        self.layout = made
        self.pool = Pool(made)
        self.identity = (node_id, generation)
        self.transport = NixlTransport(f"{node_id}-{os.getpid()}-{next(_numbers)}")
        self.peers = KvPeers()
        self.manager = SendManager(
            transport=self.transport,
            layout=made,
            storage=self.pool,
            identity=self.identity,
            config=config,
        )

    async def open(
        self,
        request_id: str,
        address: str,
        receiver: tuple[str, int],
        pages: list[int],
        tokens: int,
    ) -> SendSession:
        return await self.manager.open(
            request_id,
            peer=self.peers.to(address),
            receiver=receiver,
            prompt_tokens=tokens,
            pages=pages,
        )

    async def send(self, session: SendSession, chunks: list[tuple[int, int]]) -> None:
        """Announces every layer of every chunk, then finishes."""
        for index, (start, count) in enumerate(chunks):
            for layer in range(self.layout.num_layers):
                session.layer_ready(index, layer, start, count)
        await session.finish(first_tokens(len(chunks)))

    async def close(self) -> None:
        await self.manager.close()
        await self.peers.close()
        await asyncio.to_thread(self.transport.close)


def first_tokens(total_chunks: int) -> FinishedPrefill:
    return FinishedPrefill(first_tokens=(FirstToken(11),), total_chunks=total_chunks)


async def granted(session: SendSession) -> None:
    """Returns once the session's handshake was granted."""
    async with asyncio.timeout(HANG_S):
        while not session.timings.granted_s:  # noqa: ASYNC110 - a session has no event for it
            await asyncio.sleep(0.005)


# -- children: commands come over the pipe as (method's name, arguments)


class _ReceiverCommands:
    def __init__(self, node: ReceiverNode) -> None:
        self._node = node
        self._releases: dict[str, asyncio.Task[None]] = {}

    async def admit(self, request_id: str, pages: list[int], tokens: int) -> None:
        self._node.manager.admit(request_id, pages, tokens)

    async def event(self) -> tuple[str, ...]:
        return await self._node.event()

    async def read(self, pages: list[int], tokens: int) -> np.ndarray:
        return read(self._node.pool, self._node.layout, pages, tokens)

    async def release(self, request_id: str) -> None:
        self._releases[request_id] = asyncio.create_task(self._node.manager.release(request_id))
        await asyncio.sleep(0)

    async def released(self, request_id: str) -> None:
        async with asyncio.timeout(HANG_S):
            await self._releases.pop(request_id)

    async def check(self) -> None:
        self._node.manager.check_integrity()


class _SenderCommands:
    def __init__(self, node: SenderNode) -> None:
        self._node = node
        self._sessions: dict[str, SendSession] = {}

    async def fill(self, pages: list[int], seed: int, tokens: int) -> None:
        made = self._node.layout
        fill(self._node.pool, made, pages, expected_kv(made, seed, tokens))

    async def open(self, request_id: str, *where: Any) -> None:
        self._sessions[request_id] = await self._node.open(request_id, *where)

    async def granted(self, request_id: str) -> None:
        await granted(self._sessions[request_id])

    async def layers(self, request_id: str, chunk: int, start: int, count: int) -> None:
        for layer in range(self._node.layout.num_layers):
            self._sessions[request_id].layer_ready(chunk, layer, start, count)

    async def finish(self, request_id: str, total_chunks: int) -> None:
        await self._sessions[request_id].finish(first_tokens(total_chunks))

    async def abort(self, request_id: str, reason: str) -> None:
        await self._sessions[request_id].abort(reason)

    async def check(self) -> None:
        self._node.manager.check_integrity()


async def _obey(pipe: ChildPipe, commands: object) -> None:
    while True:
        name, *arguments = await asyncio.to_thread(pipe.hear)
        try:
            answer = await getattr(commands, name)(*arguments)
        except TransferError as error:
            answer = ("error", str(error))
        pipe.say("ok" if answer is None else answer)


def receiver_child(pipe: ChildPipe, made: KvLayout, config: TransferConfig) -> None:
    """Runs a ReceiverNode; sends its address and identity first."""

    async def serve() -> None:
        node = await ReceiverNode(made, config).start()
        pipe.say((node.address, node.identity))
        await _obey(pipe, _ReceiverCommands(node))

    asyncio.run(serve())


def sender_child(pipe: ChildPipe, made: KvLayout, config: TransferConfig) -> None:
    """Runs a SenderNode; sends its identity first."""

    async def serve() -> None:
        node = SenderNode(made, config)
        pipe.say(node.identity)
        await _obey(pipe, _SenderCommands(node))

    asyncio.run(serve())
