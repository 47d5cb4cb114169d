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
import redis.exceptions

from millrace.event_lines import event_lines
from millrace.local.options import StackOptions
from millrace.local.processes.service import StartupError
from millrace.local.stack import Stack
from millrace.state.leader import lease_name
from millrace.wire.clients.scheduler_client import get_instances
from support.deadlines import HANG_S
from support.live_stack import (
    complete,
    eventually,
    greedy_ids,
    held,
    keys_of_requests,
    live_stack,
    store_url,
)
from support.redis_cluster import OWN_PORT, redis_cluster
from support.redis_servers import watched
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

MODEL = "qwen3"
FAST = ["engine.dtype=float32", "scheduler.heartbeat_s=0.2", "scheduler.lease_s=10"]
#: Of an answer under way when something dies: decode is slow (`held`) until it does.
TOKENS = 600


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
        async for line in event_lines(response):
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
    ids = [prompt(1000, seed) for seed in range(4)]
    expected = [oracle(MODEL).greedy(p, 8) for p in ids]
    restarts = fleet.services["prefill-0"].restarts
    answers = [asyncio.create_task(greedy_ids(client, p, 8)) for p in ids]
    await asyncio.sleep(0.1)
    kill(fleet, "prefill-0")
    assert await asyncio.gather(*answers) == expected
    await eventually(lambda: fleet.services["prefill-0"].restarts == restarts + 1)


@pytest.mark.asyncio(loop_scope="module")
async def test_choices_continue_after_the_death_of_their_decode(fleet, client) -> None:
    restarts = fleet.services["decode-0"].restarts
    body = {"prompt": [9], "n": 2, "max_tokens": 1000, "temperature": 1.0, "seed": 3}
    body |= {"ignore_eos": True, "return_token_ids": True}
    undisturbed = await complete(client, **body)
    found: list[list[int]] = [[], []]
    killed = False
    asked = {"model": "tiny", "stream": True, **body}
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        async for line in event_lines(response):
            if line.startswith("data: {"):
                event = orjson.loads(line[6:])
                assert "choices" in event, event
                for choice in event["choices"]:
                    found[choice["index"]] += choice.get("token_ids") or ()
            if all(found) and not killed:
                kill(fleet, "decode-0")
                killed = True
    expected = [choice["token_ids"] for choice in undisturbed["choices"]]
    assert expected[0] != expected[1]
    assert found == expected
    await eventually(lambda: fleet.services["decode-0"].restarts == restarts + 1)
    await eventually(lambda: ready(client))
    assert await greedy_ids(client, prompt(50), 8) == oracle(MODEL).greedy(prompt(50), 8)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_fleet_and_its_answers_come_back_after_the_schedulers_death(
    fleet, client
) -> None:
    restarts = fleet.services["scheduler"].restarts
    begun = asyncio.Event()
    answer = asyncio.create_task(streamed_ids(client, [9], TOKENS, begun))
    async with held(fleet, begun.is_set):
        kill(fleet, "scheduler")
    tokens = await answer
    await eventually(lambda: fleet.services["scheduler"].restarts == restarts + 1)
    await eventually(lambda: ready(client))
    assert tokens == await greedy_ids(client, [9], TOKENS)
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


def store_of(stack: Stack) -> redis.asyncio.Redis:
    return redis.asyncio.from_url(store_url(stack))


async def redis_pid(stack: Stack) -> int:
    async with store_of(stack) as store:
        return (await store.info("server"))["process_id"]


async def is_answered(client: httpx.AsyncClient) -> bool:
    """A request gets its answer, or else 503 with `Retry-After`."""
    asked = {"model": "tiny", "prompt": prompt(50), "max_tokens": 8}
    response = await client.post("/v1/completions", json=asked)
    if response.status_code != 200:
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
    return response.status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_a_store_that_dies_is_started_again_and_costs_no_answer(fleet, client) -> None:
    """Redis holds the journal and prompts; tokens under way need neither."""
    begun = asyncio.Event()
    answer = asyncio.create_task(streamed_ids(client, [9], TOKENS, begun))
    async with held(fleet, begun.is_set):
        os.kill(await redis_pid(fleet), signal.SIGKILL)

    await eventually(lambda: is_answered(client))
    assert await answer == await greedy_ids(client, [9], TOKENS)
    assert await greedy_ids(client, prompt(50), 8) == oracle(MODEL).greedy(prompt(50), 8)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_is_migrated_after_its_store_has_lost_it(fleet, client) -> None:
    """The records of a running answer are gone with the old Redis when its decode dies."""
    undisturbed = await greedy_ids(client, [11], TOKENS)
    restarts = fleet.services["decode-0"].restarts
    begun = asyncio.Event()
    answer = asyncio.create_task(streamed_ids(client, [11], TOKENS, begun))
    lost = await redis_pid(fleet)
    assert fleet.redis_data is not None

    async def is_new() -> bool:
        try:
            return await redis_pid(fleet) != lost
        except redis.exceptions.RedisError:
            return False

    async with held(fleet, begun.is_set):
        shutil.rmtree(fleet.redis_data)
        os.kill(lost, signal.SIGKILL)
        await eventually(is_new)
        kill(fleet, "decode-0")
    assert await answer == undisturbed
    await eventually(lambda: fleet.services["decode-0"].restarts == restarts + 1)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_that_the_store_has_lost_is_written_again(fleet, client) -> None:
    """No prefill instance has read the prompt when its record is lost."""
    ids, before = prompt(80, 5), set(await keys_of_requests(fleet))

    async def is_lost() -> bool:
        new = set(await keys_of_requests(fleet)) - before
        async with store_of(fleet) as store:
            return bool(new) and await store.delete(*new) > 0

    for name in ("prefill-0", "prefill-1"):
        kill(fleet, name, signal.SIGSTOP)
    try:
        answer = asyncio.create_task(greedy_ids(client, ids, 8))
        await eventually(is_lost)
    finally:
        for name in ("prefill-0", "prefill-1"):
            kill(fleet, name, signal.SIGCONT)
    assert await answer == oracle(MODEL).greedy(ids, 8)
    metrics = (await client.get("/metrics")).text
    assert 'moved_requests_total{model="tiny",reason="unread"}' in metrics


@pytest.mark.asyncio(loop_scope="module")
async def test_a_store_that_does_not_answer_delays_no_answer(fleet, client) -> None:
    undisturbed = await greedy_ids(client, [12], TOKENS)
    begun = asyncio.Event()
    answer = asyncio.create_task(streamed_ids(client, [12], TOKENS, begun))
    store = await redis_pid(fleet)
    async with held(fleet, begun.is_set):
        os.kill(store, signal.SIGSTOP)
    try:
        refused = asyncio.create_task(
            client.post("/v1/completions", json={"model": "tiny", "prompt": [9], "max_tokens": 2})
        )
        assert await answer == undisturbed
        response = await refused
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
    finally:
        os.kill(store, signal.SIGCONT)
    assert await greedy_ids(client, [12], TOKENS) == undisturbed


@pytest.mark.asyncio(loop_scope="module")
async def test_a_frozen_decode_is_taken_for_dead_and_its_streams_continue(fleet, client) -> None:
    undisturbed = await greedy_ids(client, [13], TOKENS)
    begun = asyncio.Event()
    answer = asyncio.create_task(streamed_ids(client, [13], TOKENS, begun))
    async with held(fleet, begun.is_set):
        name = fleet.add("decode")
        assert await answer == undisturbed

    async def is_back() -> bool:
        there = await get_instances(fleet.scheduler_address)
        return any(one.id == "decode-0" and not one.draining for one in there)

    await eventually(is_back)
    fleet.remove(name)
    assert await greedy_ids(client, [13], TOKENS) == undisturbed


async def test_drain_finishes_what_runs() -> None:
    async with (
        live_stack(served_folder(MODEL), prefill=1, decode=2, settings=FAST) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        prompts = [prompt(20, seed) for seed in range(4)]
        undisturbed = await asyncio.gather(*(greedy_ids(client, ids, 400) for ids in prompts))
        begun = [asyncio.Event() for _ in prompts]
        answers = [
            asyncio.create_task(streamed_ids(client, ids, 400, first))
            for ids, first in zip(prompts, begun, strict=True)
        ]
        async with held(stack, lambda: all(first.is_set() for first in begun)) as name:
            kill(stack, name, signal.SIGTERM)
        assert await asyncio.gather(*answers) == undisturbed


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


@pytest.mark.slow
async def test_a_failover_of_the_store_costs_no_answer() -> None:
    async with (
        watched() as servers,
        live_stack(served_folder(MODEL), settings=FAST, redis_url=servers.url) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        undisturbed = await greedy_ids(client, [9], TOKENS)
        begun = asyncio.Event()
        answer = asyncio.create_task(streamed_ids(client, [9], TOKENS, begun))
        async with held(stack, begun.is_set):
            await servers.kill_primary()
        await eventually(lambda: is_answered(client))
        assert await answer == undisturbed
        assert await greedy_ids(client, prompt(50), 8) == oracle(MODEL).greedy(prompt(50), 8)
        assert [key async for key in servers.replica.scan_iter("millrace:lease:*")]


@pytest.mark.slow
async def test_a_failover_in_a_cluster_costs_no_answer() -> None:
    with redis_cluster(OWN_PORT, replica=True) as servers:
        async with (
            live_stack(served_folder(MODEL), settings=FAST, redis_url=servers.url) as stack,
            httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
        ):
            undisturbed = await greedy_ids(client, [9], TOKENS)
            body = {"model": "tiny", "input": "Once", "max_output_tokens": 16}
            stored = await client.post("/v1/responses", json=body)
            assert stored.status_code == 200, stored.text
            found = await client.get(f"/v1/responses/{stored.json()['id']}")
            assert found.status_code == 200, found.text
            begun = asyncio.Event()
            answer = asyncio.create_task(streamed_ids(client, [9], TOKENS, begun))
            async with held(stack, begun.is_set):
                lease = f"millrace:lease:{lease_name(stack.group_of(0))}".encode()
                await asyncio.to_thread(servers.follow, servers.owner(lease))
                servers.replicated()
                servers.kill_primary()
            await asyncio.to_thread(servers.promoted)
            await eventually(lambda: is_answered(client))
            assert await answer == undisturbed
            assert await greedy_ids(client, prompt(50), 8) == oracle(MODEL).greedy(prompt(50), 8)
            assert servers.replica is not None and servers.replica.client.exists(lease)
