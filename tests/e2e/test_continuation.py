"""An answer survives its decode instance: the client gets what an undisturbed run gives."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import orjson
import pytest

from millrace.event_lines import event_lines
from millrace.local.stack import Stack
from millrace.wire.clients.scheduler_client import evict, get_instances, set_cordon
from support.deadlines import HANG_S
from support.live_stack import complete, eventually, held, live_stack
from support.served_model import served_folder
from support.tiny_models import prompt

MODEL = "qwen3"
FAST = ["engine.dtype=float32", "scheduler.heartbeat_s=0.2", "scheduler.lease_s=10"]
TOKENS = 1000
GREEDY = {"temperature": 0, "logprobs": 1}
SAMPLED = {
    "temperature": 1.2,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
}


def body(seed: int) -> dict[str, Any]:
    """Every second one is sampled, with penalties."""
    return {
        "prompt": prompt(40 + seed, seed),
        "max_tokens": TOKENS,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
        **(SAMPLED if seed % 2 else GREEDY),
    }


class Client:
    """A streamed answer, as it comes."""

    def __init__(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        self.token_ids: list[int] = []
        self.error = ""
        self.moves = 0
        self._client = client
        self._body = {"model": "tiny", "stream": True, **body}
        self.done = asyncio.create_task(self._read())

    async def _read(self) -> None:
        headers = {"x-millrace-trace": "1"}
        async with self._client.stream(
            "POST", "/v1/completions", json=self._body, headers=headers
        ) as response:
            assert response.status_code == 200
            async for line in event_lines(response):
                if line[:7] == "data: {":
                    self._take(orjson.loads(line[6:]))

    def _take(self, chunk: dict[str, Any]) -> None:
        self.error = chunk.get("error", {}).get("message", self.error)
        for choice in chunk.get("choices", ()):
            self.token_ids += choice.get("token_ids") or []
        spans = chunk.get("millrace", {}).get("spans", ())
        self.moves += sum(span["name"] == "moved" for span in spans)


async def disturbed(
    client: httpx.AsyncClient,
    bodies: list[dict[str, Any]],
    stack: Stack,
    disturb: Callable[[str], Awaitable[None]],
) -> tuple[list[Client], str]:
    """All answers at once, and the decode instance that is disturbed once tokens of each came."""
    answers = [Client(client, body) for body in bodies]
    async with held(stack, lambda: all(len(one.token_ids) > 5 for one in answers)) as name:
        await disturb(name)
    await asyncio.gather(*(answer.done for answer in answers))
    return answers, name


async def undisturbed(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[list[int]]:
    answers = await asyncio.gather(*(complete(client, **body) for body in bodies))
    return [answer["choices"][0]["token_ids"] for answer in answers]


def scheduler_of(stack: Stack) -> str:
    return f"127.0.0.1:{stack.services['scheduler'].port}"


async def holds_nothing(stack: Stack, name: str) -> bool:
    found = {i.id: i for i in await get_instances(scheduler_of(stack))}
    return name in found and found[name].held_requests == 0


async def test_answers_survive_the_death_of_their_decode_instance() -> None:
    bodies = [body(seed) for seed in range(2)]
    async with (
        live_stack(served_folder(MODEL), prefill=1, decode=2, settings=FAST) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        expected = await undisturbed(client, bodies)

        async def kill(name: str) -> None:
            process = stack.services[name].process
            assert process is not None
            process.send_signal(signal.SIGKILL)
            await process.wait()
            stack.remove(name)  # for good

        answers, _ = await disturbed(client, bodies, stack, kill)
        assert [answer.error for answer in answers] == [""] * 2
        assert [answer.token_ids for answer in answers] == expected
        assert sum(answer.moves for answer in answers) > 0
        (other,) = [name for name in stack.services if name.startswith("decode-")]
        await eventually(lambda: holds_nothing(stack, other))


@pytest.mark.slow
async def test_answers_survive_an_eviction_and_end_with_an_abort() -> None:
    bodies = [body(seed) for seed in range(2)]
    async with (
        live_stack(served_folder(MODEL), prefill=1, decode=2, settings=FAST) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        expected = await undisturbed(client, bodies)
        address = scheduler_of(stack)
        answers, name = await disturbed(
            client, bodies, stack, lambda name: evict(address, name, abort=False)
        )
        assert [answer.error for answer in answers] == [""] * 2
        assert [answer.token_ids for answer in answers] == expected
        assert sum(answer.moves for answer in answers) > 0
        await eventually(lambda: holds_nothing(stack, name))

        answers, name = await disturbed(
            client, bodies, stack, lambda name: evict(address, name, abort=True)
        )
        assert any("let go of its requests" in answer.error for answer in answers)
        for answer, whole in zip(answers, expected, strict=True):
            assert answer.error or answer.token_ids == whole
        await eventually(lambda: holds_nothing(stack, name))
        await set_cordon(address, name, cordoned=False)
        assert await undisturbed(client, bodies[:1]) == expected[:1]
