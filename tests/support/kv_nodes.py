"""A decode-like node (pool, ReceiveManager, gRPC service) and a prefill-like one (SendManager).

Either may run in this process or in a child of its own; the transport is NIXL in both.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np

from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import Run
from millrace.core.token_events import FinishedPrefill, FirstToken
from millrace.instance.transfer.kv_servicer import KvReceiverServicer
from millrace.transfer.push.control import ReceiveCallbacks
from millrace.transfer.push.receive.manager import ReceiveManager
from millrace.transfer.push.send.manager import SendManager, SendSession
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.wire.clients.kv_peer import KvPeers
from millrace.wire.server import bind, create_server
from support.deadlines import HANG_S, eventually
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


class PagedKv:
    """A pool, its free pages, and its tokens as single views."""

    def __init__(self, made: KvLayout) -> None:
        self.layout = made
        self.pool = Pool(made)
        self.free = set(range(made.num_pages))
        shape = (made.parts, made.num_layers, made.num_pages, 2, made.part_heads)
        self._rows = self.pool.array.reshape(*shape, made.page_tokens, made.head_dim)

    def take(self, count: int) -> list[int]:
        pages = random.sample(sorted(self.free), count)
        self.free.difference_update(pages)
        return pages

    def slot(self, pages: Sequence[int], slot: int) -> np.ndarray:
        """Returns writable KV of a token, [parts, layers, 2, heads of a part, head_dim]."""
        page, row = divmod(slot, self.layout.page_tokens)
        return self._rows[:, :, pages[page], :, :, row]

    def of_token(self, kv: np.ndarray, token: int) -> np.ndarray:
        """Returns this pool's part of kv [layers, 2, heads, tokens, head_dim] of the whole
        model.
        """
        made = self.layout
        layers = slice(made.layer_start, made.layer_end)
        heads = kv[layers, :, made.head_start : made.head_end, token]
        split = heads.reshape(made.num_layers, 2, made.parts, made.part_heads, made.head_dim)
        return split.transpose(2, 0, 1, 3, 4)

    def fill(self, pages: Sequence[int], runs: Sequence[Run], kv: np.ndarray) -> None:
        for run in runs:
            for i in range(run.num_tokens):
                self.slot(pages, run.slot + i)[:] = self.of_token(kv, run.start_token + i)

    def holds(self, pages: Sequence[int], runs: Sequence[Run], kv: np.ndarray) -> bool:
        return all(
            (self.slot(pages, run.slot + i) == self.of_token(kv, run.start_token + i)).all()
            for run in runs
            for i in range(run.num_tokens)
        )


class KvReceiver(PagedKv):
    """A pool and its ReceiveManager."""

    def __init__(
        self,
        identity: tuple[str, int],
        transport: Transport,
        made: KvLayout,
        config: TransferConfig,
        callbacks: ReceiveCallbacks,
    ) -> None:
        super().__init__(made)
        self.identity, self.transport = identity, transport
        self.manager = ReceiveManager(
            transport=transport,
            layout=made,
            storage=self.pool,
            identity=identity,
            config=config,
            callbacks=callbacks,
        )

    async def close(self) -> None:
        """Raises IntegrityError when anything was left behind."""
        await eventually(lambda: not self.manager.num_leases)
        self.manager.check_integrity()
        await self.manager.close()
        await asyncio.to_thread(self.transport.close)


class KvSender(PagedKv):
    """A pool and its SendManager."""

    def __init__(
        self,
        identity: tuple[str, int],
        transport: Transport,
        made: KvLayout,
        config: TransferConfig,
    ) -> None:
        super().__init__(made)
        self.identity, self.transport = identity, transport
        self.manager = SendManager(
            transport=transport,
            layout=made,
            storage=self.pool,
            identity=identity,
            config=config,
        )

    async def close(self) -> None:
        self.manager.check_integrity()
        await self.manager.close()
        await asyncio.to_thread(self.transport.close)


class ServedReceiver(KvReceiver):
    """A receiver with its gRPC service, once it is started."""

    def __init__(self, *receiver: Any) -> None:
        super().__init__(*receiver)
        self.server: grpc.aio.Server = create_server()
        KvReceiverServicer(self.manager).add_to(self.server)
        self.address = f"127.0.0.1:{bind(self.server, '127.0.0.1', 0)}"

    async def close(self) -> None:
        await self.server.stop(grace=None)
        await super().close()


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


class ReceiverNode(ServedReceiver):
    """The transfer parts of a decode instance. `events` lists the calls of its callbacks."""

    def __init__(
        self, made: KvLayout, config: TransferConfig, *, node_id: str = "decode-0", generation=7
    ) -> None:
        self.events: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        said = self.events.put_nowait
        callbacks = ReceiveCallbacks(
            on_first_tokens=lambda i, m: said(
                ("first", i, str([t.token_id for t in m.first_tokens]))
            ),
            on_landed=lambda i: said(("landed", i)),
            on_prefix=lambda i, attempt, tokens: None,
            on_failed=lambda i, message, *kept: said(("failed", i, message)),
        )
        super().__init__((node_id, generation), nixl(node_id), made, config, callbacks)

    async def start(self) -> ReceiverNode:
        await self.server.start()
        return self

    async def event(self, timeout_s: float = HANG_S) -> tuple[str, ...]:
        async with asyncio.timeout(timeout_s):
            return await self.events.get()


class SenderNode(KvSender):
    """The transfer parts of a prefill instance."""

    def __init__(
        self, made: KvLayout, config: TransferConfig, *, node_id: str = "prefill-0", generation=5
    ) -> None:
        super().__init__((node_id, generation), nixl(node_id), made, config)
        self.peers = KvPeers()

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
        await super().close()
        await self.peers.close()


def nixl(node_id: str) -> NixlTransport:
    return NixlTransport(f"{node_id}-{os.getpid()}-{next(_numbers)}")


def first_tokens(total_chunks: int) -> FinishedPrefill:
    return FinishedPrefill(first_tokens=(FirstToken(11),), total_chunks=total_chunks)


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
        timings = self._sessions[request_id].timings
        await eventually(lambda: timings.granted_s)

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
