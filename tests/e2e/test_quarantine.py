"""A request that kills the instances that run it ends; the requests beside it go on."""

import asyncio

import httpx
import orjson
import pytest

from millrace.event_lines import event_lines
from millrace.local.stack import Stack
from support.deadlines import HANG_S
from support.live_stack import eventually, greedy_ids, held, live_stack
from support.served_model import served_folder
from support.tiny_models import prompt

SETTINGS = [
    *("engine.dtype=float32", "scheduler.heartbeat_s=0.2", "scheduler.lease_s=10"),
    *("scheduler.max_deaths=1", "scheduler.isolation_s=1"),
]
BYSTANDER = prompt(30, 3)
POISON = prompt(30, 4)


class Reader:
    """Reads a stream to its end: its token ids, and its error."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.error: dict[str, str] = {}

    async def read(self, client: httpx.AsyncClient, ids: list[int], count: int) -> None:
        body = {"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        body |= {"model": "tiny", "stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in event_lines(response):
                if line.startswith("data: {"):
                    event = orjson.loads(line[6:])
                    self.error = event.get("error", {})
                    for choice in event.get("choices", ()):
                        self.ids += choice.get("token_ids") or ()


async def kill_where_it_runs(stack: Stack, poison: Reader, reading: asyncio.Task[None]) -> None:
    """Kills the decode instance as soon as the poison has a further token, or has ended."""
    service = stack.services["decode-0"]
    restarts, seen = service.restarts, len(poison.ids)
    async with held(stack, lambda: len(poison.ids) > seen or reading.done()):
        if reading.done():
            return
        assert service.process is not None
        service.process.kill()
    await eventually(lambda: service.restarts > restarts and service.serving)


@pytest.mark.slow
async def test_a_request_that_kills_its_instances_is_quarantined_and_no_other_is() -> None:
    async with (
        live_stack(served_folder("qwen3"), prefill=1, decode=1, settings=SETTINGS) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        undisturbed = await greedy_ids(client, BYSTANDER, 400)
        bystander, poison = Reader(), Reader()
        beside = asyncio.create_task(bystander.read(client, BYSTANDER, 400))
        reading = asyncio.create_task(poison.read(client, POISON, 2000))
        deaths = 0
        while not reading.done():
            await kill_where_it_runs(stack, poison, reading)
            deaths += not reading.done()
            assert deaths < 8
        await asyncio.gather(beside, reading)

        assert poison.error["code"] == "quarantined", poison.error
        assert "decode-0" in poison.error["message"]
        assert (bystander.error, bystander.ids) == ({}, undisturbed)
        assert await greedy_ids(client, BYSTANDER, 400) == undisturbed
