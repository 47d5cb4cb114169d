"""The receiving process of `millrace bench transfer`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.core.kv_layout import KvLayout
from millrace.decode.kv_servicer import KvReceiverServicer
from millrace.engine.kv_pool import KvPool
from millrace.transfer.nixl_transport import NixlTransport
from millrace.transfer.receive_manager import ReceiveManager
from millrace.wire.server import bind, create_server

MIB = 1 << 20
#: Staging of the buffered receiver: half of it holds 4 MiB, 1024 tokens of a layer.
BUFFER_BYTES = 8 * MIB
ANSWER_TIMEOUT_S = 60.0
BARE_RECEIVER = "bench-bare-receiver"


def bare_agent(name: str) -> Any:  # noqa: ANN401 - NIXL has no types
    """An agent as `NixlTransport` makes one, to be used directly."""
    from nixl_cu12._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

    strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, sync_mode=strict))


def region_rows(pointer: int, nbytes: int) -> Any:  # noqa: ANN401 - NIXL has no types
    """One descriptor of host memory, uint64 [1, 3]: address, bytes, device."""
    return np.array([[pointer, nbytes, 0]], dtype=np.uint64)


def receive(pipe: Connection, layout: KvLayout) -> None:
    """The process's target: says the receivers' addresses and the bare agent, then obeys."""
    asyncio.run(_serve(pipe, layout))


async def _serve(pipe: Connection, layout: KvLayout) -> None:
    """Serves a buffer-free and a buffered receiver and a bare agent, as the pipe commands."""
    landed: asyncio.Queue[str] = asyncio.Queue()
    managers: dict[str, ReceiveManager] = {}
    addresses: dict[str, str] = {}
    pool = KvPool(layout).storage.fill_(1)  # so that no page is touched for the first time later
    servers = []
    for mode, buffer_bytes in (("buffer-free", 0), ("buffered", BUFFER_BYTES)):
        server = create_server()
        managers[mode] = ReceiveManager(
            transport=NixlTransport(f"bench-{mode}-{os.getpid()}"),
            layout=layout,
            storage=pool,
            identity=(mode, 1),
            config=TransferConfig(buffer_bytes=buffer_bytes),
            on_first_tokens=lambda request_id, message: None,
            on_landed=landed.put_nowait,
            on_failed=lambda request_id, message: landed.put_nowait(f"{request_id}: {message}"),
        )
        KvReceiverServicer(managers[mode]).add_to(server)
        addresses[mode] = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
        await server.start()
        servers.append(server)
    bare = _BareReceiver(pool)
    pipe.send(addresses)
    pipe.send((bare.agent.get_agent_metadata(), pool.data_ptr()))
    while True:
        name, *arguments = await asyncio.to_thread(pipe.recv)
        answer: object = None
        if name == "admit":
            mode, *rest = arguments
            managers[mode].admit(*rest)
        elif name == "landed":
            mode, request = arguments
            answer = await asyncio.wait_for(landed.get(), ANSWER_TIMEOUT_S)
            if answer != request:
                raise TransferError(f"{answer} instead of {request}")
            await managers[mode].release(request)
        elif name == "poll":
            bare.poll(arguments[0])
        pipe.send(answer)


class _BareReceiver:
    """The target of bare writes; a thread polls its agent while asked to."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.agent = bare_agent(BARE_RECEIVER)
        self.agent.register_memory(region_rows(pool.data_ptr(), pool.nbytes), "DRAM")
        self._polling = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def poll(self, wanted: bool) -> None:
        if wanted:
            self._polling.set()
        else:
            self._polling.clear()

    def _work(self) -> None:
        while self._polling.wait():
            self.agent.get_new_notifs()
            time.sleep(100e-6)
