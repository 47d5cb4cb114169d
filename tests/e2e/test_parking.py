"""A request waits in the proxy for the first instance of a pool, and wakes it."""

import asyncio

import httpx
import pytest

from millrace.wire.clients.scheduler_client import get_load
from support.deadlines import HANG_S
from support.live_stack import eventually, greedy_ids, live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

MODEL = "qwen3"


@pytest.mark.slow
async def test_a_request_waits_for_the_only_prefill_instance() -> None:
    settings = ["engine.dtype=float32", "proxy.park_timeout_s=60"]
    async with (
        live_stack(served_folder(MODEL), prefill=0, settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        address = f"127.0.0.1:{stack.services['scheduler'].port}"
        assert (await client.get("/ready")).status_code == 200
        asking = [asyncio.create_task(greedy_ids(client, prompt(50, s), 8)) for s in range(3)]

        async def parked(count: int) -> bool:
            return (await get_load(address)).parked_requests == count

        await eventually(lambda: parked(3))
        assert not any(task.done() for task in asking)
        stack.add("prefill")
        answers = await asyncio.gather(*asking)
        assert answers == [oracle(MODEL).greedy(prompt(50, s), 8) for s in range(3)]
        await eventually(lambda: parked(0))
