"""A KVP worker as a process of its own, over NIXL."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from millrace.core.kv.kvp_pass import RemoteShard
from millrace.engine.decode_batch import DecodeBatch
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.stage_passes import StagePasses
from millrace.engine.model.loader import load_model
from millrace.engine.sampling.sampler import Sampler
from millrace.transfer.transport.nixl.transport import NixlTransport
from support.kvp_world import KvOwner, KvpWorker, Long, prefill_long, sequence_of
from support.tiny_engine import Request, greedy, make_pool
from support.tiny_models import model_folder, prompt
from support.transfer_peers import Child, ChildPipe

STEPS = 12


def serve(pipe: ChildPipe, folder: Path) -> None:
    """Runs a KVP worker until the pipe closes."""
    transport = NixlTransport(f"worker-{os.getpid()}")
    model = load_model(folder, device="cpu")
    worker = KvpWorker("worker", model, transport, page_tokens=8, max_rows=16)
    pipe.say(transport.metadata())
    metadata, region, offset = pipe.hear()
    attachment = asyncio.run(worker.server.attach(metadata=metadata, region=region, offset=offset))
    pipe.say((attachment.slot, attachment.region, attachment.offset))
    while True:
        pipe.say(worker.open(*pipe.hear()))


class Pair:
    """A KV owner in this process, a KVP worker in another."""

    def __init__(self) -> None:
        folder = model_folder("llama")
        self.child = Child(serve, folder)
        self.transport = NixlTransport(f"owner-{os.getpid()}")
        self.owner = KvOwner(
            load_model(folder, device="cpu"), self.transport, page_tokens=8, max_rows=16
        )
        offer = self.owner.exchange.offer()
        metadata = self.child.receive()
        slot, region, offset = self.child.ask(
            (self.transport.metadata(), offer.region, offer.offset)
        )
        asyncio.run(
            self.owner.exchange.attach(
                "worker", offer, metadata=metadata, slot=slot, region=region, offset=offset
            )
        )

    def spread(self, tokens: list[int], end: int) -> Long:
        """Opens a request whose tokens after `end` are at the KVP worker; all are at the owner at
        128.
        """
        request = Long.__new__(Long)
        request.tokens = list(tokens)
        pool = self.owner.runner.pool
        request.pages = pool.allocate(pool.layout.pages_for(end))
        request.shards = ()
        if end < 128:
            shard = self.child.ask((end, 128))
            request.shards = (
                RemoteShard(worker="worker", shard=shard, start_token=end, end_token=128),
            )
        return request

    def close(self) -> None:
        self.child.close()
        self.transport.close()


def test_tokens_of_one_instance_until_the_worker_dies():
    pair = Pair()
    try:
        runner = pair.owner.runner
        alone = ModelRunner(
            StagePasses(runner.model, make_pool(runner.model, page_tokens=8, num_pages=64))
        )
        prompts = [prompt(50, seed=1), prompt(60, seed=2)]
        expected = greedy(alone, [Request(alone, p, STEPS) for p in prompts], STEPS)
        batch = DecodeBatch(runner, runner.pool, Sampler(), max_batch=4)
        for i, end in enumerate((24, 128)):
            request = pair.spread(prompts[i], end)
            first = int(prefill_long(runner, request, (30,)).argmax())
            batch.add(sequence_of(request, str(i), first, STEPS))
        found: dict[str, list[int]] = {"0": [expected[0][0]], "1": [expected[1][0]]}
        for step in range(STEPS - 1):
            if step == 6:
                pair.child.signal(signal.SIGKILL)
            for out in batch.step():
                found[out.request_id].append(out.token_id)
        assert found == {"0": [*expected[0][:7], -1], "1": expected[1]}
        assert list(pair.owner.lost) == ["worker"]
    finally:
        pair.close()
