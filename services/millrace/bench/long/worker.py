"""A KVP worker process of `bench/long/kvp.py`: attention over its shard, timed by its own CPU.

A command is a tuple of a method's name and its arguments; every command has an answer.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from millrace.core.config import EngineConfig
from millrace.core.errors import TransferError
from millrace.core.kv.kvp_pass import RemoteShard
from millrace.engine.assembly import open_kv_only
from millrace.engine.attention.kvp_memory import exchange_memory
from millrace.engine.attention.kvp_worker import ShardAttention
from millrace.instance.shards.shard_host import exchange_shape
from millrace.instance.shards.shard_metrics import TimedShards
from millrace.transfer.kvp.exchange import KvpExchange
from millrace.transfer.kvp.server import KvpServer
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Memory

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 60.0
LEASE_S = 5.0


class WorkerProcess:
    """A KVP worker process as its KV owner sees it. `shard` is its shard now, if any."""

    def __init__(self, name: str, model: Path, config: EngineConfig) -> None:
        self.name = name
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, name, model, config), daemon=True
        )
        self._process.start()
        theirs.close()

    async def attach(self, exchange: KvpExchange, metadata: bytes) -> None:
        """Attaches the worker to the exchange. `metadata` is the KV owner's transport's."""
        self._hear(START_TIMEOUT_S)  # the process has started
        offer = exchange.offer()
        attached = self.ask("attach", metadata, offer.region, offer.offset)
        await exchange.attach(self.name, offer, **attached)

    def hold(self, start_token: int, end_token: int, kv_tokens: int) -> RemoteShard:
        """Frees the worker's shard and opens a shard whose first `kv_tokens` tokens are there."""
        shard = self.ask("hold", start_token, end_token, kv_tokens)
        return RemoteShard(
            worker=self.name, shard=shard, start_token=start_token, end_token=end_token
        )

    def attention_s(self) -> float:
        """Returns CPU seconds of attention over its shard since the last call."""
        return float(self.ask("attention_s"))

    def ask(self, *command: Any) -> Any:  # noqa: ANN401 - as the command has it
        """Raises TransferError when there is no answer in time."""
        self._pipe.send(command)
        return self._hear(ANSWER_TIMEOUT_S)

    def _hear(self, timeout_s: float) -> Any:  # noqa: ANN401
        if not self._pipe.poll(timeout_s):
            raise TransferError(f"{self.name} did not answer in time")
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise TransferError(f"{self.name} has ended") from error

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def worker_processes(
    count: int, model: Path, config: EngineConfig
) -> Iterator[list[WorkerProcess]]:
    """Starts KVP worker processes, which end with the block."""
    started = [WorkerProcess(f"worker-{number}", model, config) for number in range(count)]
    try:
        yield started
    finally:
        for worker in started:
            worker.kill()


class _Worker:
    def __init__(self, name: str, model: Path, config: EngineConfig) -> None:
        memory = open_kv_only(model, config)
        self._pool = memory.pool
        self._pool.storage.normal_()
        shape = exchange_shape(memory)
        exchanged = exchange_memory(KvpServer.memory_bytes(shape, 1))
        attention = ShardAttention(
            memory.storage, shape, exchanged, memory.shape.sliding_windows, config.attention_backend
        )
        self._cpu_s = 0.0
        self._transport = NixlTransport(f"{name}-{os.getpid()}")
        self._server = KvpServer(
            self._transport,
            Memory.of_tensor(exchanged),
            shape,
            TimedShards(attention, self._took, time.thread_time),
            owners=1,
            lease_s=LEASE_S,
        )
        self._shard = 0
        self._pages: list[int] = []

    async def attach(self, metadata: bytes, region: int, offset: int) -> dict[str, Any]:
        attachment = await self._server.attach(metadata=metadata, region=region, offset=offset)
        return {
            "metadata": self._transport.metadata(),
            "slot": attachment.slot,
            "region": attachment.region,
            "offset": attachment.offset,
        }

    async def hold(self, start_token: int, end_token: int, kv_tokens: int) -> int:
        if self._shard:
            await asyncio.wrap_future(self._server.close_shard(self._shard))
            self._pool.free(self._pages)
        self._pages = self._pool.allocate(self._pool.layout.pages_for(end_token - start_token))
        self._shard = self._server.open_shard(self._pages, start_token, end_token)
        self._server.landed(self._shard, start_token + kv_tokens)
        return self._shard

    def _took(self, cpu_s: float) -> None:
        self._cpu_s += cpu_s

    def attention_s(self) -> float:
        spent_s, self._cpu_s = self._cpu_s, 0.0
        return spent_s


def _serve(pipe: Connection, name: str, model: Path, config: EngineConfig) -> None:
    worker = _Worker(name, model, config)
    pipe.send("started")
    asyncio.run(_obey(pipe, worker))


async def _obey(pipe: Connection, worker: _Worker) -> None:
    while True:
        answer: object
        match await asyncio.to_thread(pipe.recv):
            case "attach", metadata, region, offset:
                answer = await worker.attach(metadata, region, offset)
            case "hold", start_token, end_token, kv_tokens:
                answer = await worker.hold(start_token, end_token, kv_tokens)
            case _:
                answer = worker.attention_s()
        pipe.send(answer)
