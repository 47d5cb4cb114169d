"""Instances of two revisions of a model serve side by side, and exchange no KV."""

from __future__ import annotations

import asyncio

import pytest

from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from support.deadlines import HANG_S
from support.kv_nodes import ReceiverNode, SenderNode, layout, pages_of
from support.scheduler_peers import Worker, quick, scheduler, spec

REQUESTS = 12


async def test_the_scheduler_pairs_prefill_and_decode_of_one_revision() -> None:
    async with scheduler(quick(tasks_ahead=REQUESTS)) as net:
        workers = {
            name: await net.worker(name, model_hash=f"weights@{name[1:]}")
            for name in ("p-old", "p-new", "d-old", "d-new")
        }
        proxy = await net.proxy()
        await proxy.submit(*(spec(f"r{i}") for i in range(REQUESTS)))
        pairs: list[tuple[str, str]] = []
        everything = asyncio.Event()

        async def read(worker: Worker) -> None:
            while True:
                command = await worker.next()
                if command.WhichOneof("kind") == "run_prefill":
                    pairs.append((worker.id, command.run_prefill.decode.incarnation.id))
                if len(pairs) == REQUESTS:
                    everything.set()

        reading = [asyncio.create_task(read(workers[name])) for name in ("p-old", "p-new")]
        await asyncio.wait_for(everything.wait(), HANG_S)
        for name in ("p-old", "p-new"):
            await workers[name].cut()
        await asyncio.gather(*reading, return_exceptions=True)
    assert set(pairs) == {("p-old", "d-old"), ("p-new", "d-new")}


async def test_a_transfer_between_revisions_is_refused_by_both_names() -> None:
    config = TransferConfig(handshake_timeout_s=HANG_S)
    receiver = await ReceiverNode(layout(model_hash="weights@old"), config).start()
    sender = SenderNode(layout(model_hash="weights@new"), config)
    try:
        pages = pages_of(receiver.layout, 20, 1)
        receiver.manager.admit("r", pages, 20)
        session = await sender.open("r", receiver.address, receiver.identity, pages, 20)
        with pytest.raises(TransferError, match=r"'weights@new', the receiver 'weights@old'"):
            await sender.send(session, [(0, 20)])
        await session.abort("it was refused")
        await receiver.manager.release("r")
    finally:
        await sender.close()
        await receiver.close()
