"""What happens when something dies: the right tokens or an error, never a wait, never a leak."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import orjson
import pytest
import pytest_asyncio
import redis.asyncio

from millrace.local.service import StartupError
from millrace.local.stack import Stack, StackOptions
from support.deadlines import HANG_S
from support.live_stack import eventually, greedy_ids, live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

MODEL = "qwen3"
FAST = ["engine.dtype=float32", "scheduler.heartbeat_s=0.2", "scheduler.lease_s=10"]


def kill(stack: Stack, name: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Ends one service of the stack under test; returns its pid."""
    process = stack.services[name].process
    assert process is not None
    os.kill(process.pid, number)
    return process.pid


async def streamed_ids(
    client: httpx.AsyncClient, ids: list[int], count: int, begun: asyncio.Event
) -> list[int]:
    """The greedy continuation, read from a stream; `begun` when its first event is there."""
    body = {"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body |= {"model": "tiny", "stream": True, "return_token_ids": True}
    found: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                begun.set()
                event = orjson.loads(line[6:])
                assert "choices" in event, event
                for choice in event["choices"]:
                    found += choice.get("token_ids") or ()
    return found


async def ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/ready")).status_code == 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Stack]:
    """A stack that one test after the other does harm to, as faults come to a fleet."""
    settings = [*FAST, "scheduler.lease_s=3", "engine.max_chunk_tokens=32"]
    async with live_stack(served_folder(MODEL), settings=settings) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(fleet: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fleet.url, timeout=2 * HANG_S) as opened:
        await eventually(lambda: all(one.serving for one in fleet.services.values()))
        await eventually(lambda: ready(opened))
        yield opened


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prefill_that_dies_costs_no_request(fleet, client) -> None:
    ids = [prompt(2500, seed) for seed in range(4)]  # none is computed when the kill comes
    expected = [oracle(MODEL).greedy(p, 8) for p in ids]
    restarts = fleet.services["prefill-0"].restarts
    answers = [asyncio.create_task(greedy_ids(client, p, 8)) for p in ids]
    await asyncio.sleep(0.3)
    kill(fleet, "prefill-0")
    assert await asyncio.gather(*answers) == expected
    await eventually(lambda: fleet.services["prefill-0"].restarts == restarts + 1)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_decode_that_dies_ends_streams_of_several_choices_with_an_error(
    fleet, client
) -> None:
    restarts = fleet.services["decode-0"].restarts
    body = {"model": "tiny", "prompt": [9], "n": 2, "max_tokens": 4000, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as s:
        lines = s.aiter_lines()
        await anext(lines)
        kill(fleet, "decode-0")
        rest = [line async for line in lines]
    assert any('"error"' in line for line in rest)
    await eventually(lambda: fleet.services["decode-0"].restarts == restarts + 1)
    await eventually(lambda: ready(client))
    assert await greedy_ids(client, prompt(50), 8) == oracle(MODEL).greedy(prompt(50), 8)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_fleet_and_its_answers_come_back_after_the_schedulers_death(
    fleet, client
) -> None:
    restarts = fleet.services["scheduler"].restarts
    begun = asyncio.Event()
    answer = asyncio.create_task(streamed_ids(client, [9], 2000, begun))
    await asyncio.wait_for(begun.wait(), HANG_S)
    kill(fleet, "scheduler")
    tokens = await answer
    await eventually(lambda: fleet.services["scheduler"].restarts == restarts + 1)
    await eventually(lambda: ready(client))
    assert tokens == await greedy_ids(client, [9], 2000)
    assert await greedy_ids(client, prompt(50), 8) == oracle(MODEL).greedy(prompt(50), 8)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_frozen_prefill_is_taken_for_dead(fleet, client) -> None:
    kill(fleet, "prefill-0", signal.SIGSTOP)
    ids = [prompt(60, seed) for seed in range(4)]
    answers = await asyncio.gather(*(greedy_ids(client, p, 8) for p in ids))
    assert answers == [oracle(MODEL).greedy(p, 8) for p in ids]
    kill(fleet, "prefill-0", signal.SIGCONT)
    await asyncio.sleep(0.5)
    assert await greedy_ids(client, ids[0], 8) == answers[0]


async def test_requests_outlive_their_store_and_new_ones_are_refused() -> None:
    """Redis holds the journal and prompts; tokens under way need neither."""
    async with (
        live_stack(served_folder(MODEL), prefill=1, settings=FAST) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        begun = asyncio.Event()
        answer = asyncio.create_task(streamed_ids(client, prompt(50), 400, begun))
        await asyncio.wait_for(begun.wait(), HANG_S)
        url = next(a for a in stack.services["proxy"].arguments if a.startswith("store.url="))
        async with redis.asyncio.from_url(url.removeprefix("store.url=")) as store:
            await store.shutdown(nosave=True)
        refused = await client.post("/v1/completions", json={"model": "tiny", "prompt": [9]})
        assert refused.status_code == 503
        assert await answer == oracle(MODEL).greedy(prompt(50), 400)


async def test_drain_finishes_what_runs() -> None:
    async with (
        live_stack(served_folder(MODEL), prefill=1, decode=2, settings=FAST) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        answers = [asyncio.create_task(greedy_ids(client, prompt(20, s), 400)) for s in range(4)]
        await asyncio.sleep(0.3)
        kill(stack, "decode-0", signal.SIGTERM)
        for seed, answer in enumerate(await asyncio.gather(*answers)):
            assert answer == oracle(MODEL).greedy(prompt(20, seed), 400)


@pytest.mark.slow
async def test_buffered_transfers_give_the_same_tokens() -> None:
    settings = ["engine.dtype=float32", "transfer.buffer_bytes=65536", "transfer.backends=2"]
    ids = [prompt(length, length) for length in (3, 200, 1500)]
    async with (
        live_stack(served_folder(MODEL), settings=settings) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        answers = await asyncio.gather(*(greedy_ids(client, p, 16) for p in ids))
    assert answers == [oracle(MODEL).greedy(p, 16) for p in ids]


async def test_a_damaged_model_ends_start_up_with_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(served_folder(MODEL), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])

    with pytest.raises(StartupError, match=r"model\.safetensors") as caught:
        async with Stack(StackOptions(model=str(folder), port=0)):
            pass
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
