"""A scheduler that stands by takes over: every answer is right to the token, and none is lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import orjson
import pytest
import pytest_asyncio

from millrace.event_lines import event_lines
from millrace.local.processes.service import Service
from millrace.local.stack import Stack
from support.deadlines import HANG_S
from support.live_stack import eventually, leader_of, lease_of, live_stack
from support.served_model import served_folder
from support.tiny_models import prompt

MODEL = "qwen3"
#: Far above what a takeover takes on an idle machine (2 s): only a hang is longer.
MOST_PAUSE_S = 30.0

SETTINGS = [
    *("engine.dtype=float32", "engine.max_chunk_tokens=32"),
    *("scheduler.heartbeat_s=0.2", "scheduler.lease_s=10"),
]

#: Short prompts with long answers decode when the leader dies; long prompts are computed or wait.
SHORT = range(4)
ASKED = [
    *((prompt(20, seed), 400) for seed in SHORT),
    *((prompt(900, seed), 40) for seed in range(6)),
]


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def pause_s(self) -> float:
        return max(b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False))


async def stream(
    client: httpx.AsyncClient, asked: list[int], tokens: int, answer: Answer | None = None
) -> Answer:
    """A greedy stream, which must end without an error."""
    answer = answer or Answer()
    answer.times_s.append(time.monotonic())
    body = {
        "model": "tiny",
        "prompt": asked,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in event_lines(response):
            assert '"error"' not in line, line
            if line.startswith("data: {"):
                for choice in orjson.loads(line[6:])["choices"]:
                    answer.ids += choice.get("token_ids") or []
                    answer.times_s.append(time.monotonic())
    assert len(answer.ids) == tokens
    return answer


class Streams:
    """All answers that are asked for, at once. Some decode soon, the long prompts wait longer."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.answers = [Answer() for _ in ASKED]
        self._all = asyncio.gather(
            *(
                stream(client, *asked, answer)
                for asked, answer in zip(ASKED, self.answers, strict=True)
            )
        )

    async def begun(self, tokens: int = 5) -> None:
        """Waits until all short prompts decode, or an answer has failed."""
        await eventually(
            lambda: self._all.done() or all(len(self.answers[n].ids) >= tokens for n in SHORT)
        )

    async def ended(self) -> list[Answer]:
        await self._all
        return self.answers


@dataclass
class Fleet:
    stack: Stack
    client: httpx.AsyncClient
    undisturbed: list[list[int]] = field(default_factory=list)

    async def another_leads(self, epoch: int) -> bool:
        lease = await lease_of(self.stack)
        return lease.epoch > epoch and lease.left_s > 0

    async def check(self, answers: list[Answer], what: str) -> None:
        for asked, (answer, right) in enumerate(zip(answers, self.undisturbed, strict=True)):
            assert answer.ids == right, f"answer {asked} differs"
        longest = max(answer.pause_s for answer in answers)
        print(f"{what}: longest pause {longest:.2f} s")
        assert longest < MOST_PAUSE_S


@asynccontextmanager
async def running() -> AsyncIterator[Fleet]:
    async with (
        live_stack(served_folder(MODEL), prefill=2, schedulers=2, settings=SETTINGS) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        fleet = Fleet(stack, client)
        fleet.undisturbed = [answer.ids for answer in await Streams(client).ended()]
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with running() as found:
        yield found


def send(service: Service, number: signal.Signals) -> None:
    assert service.process is not None
    service.process.send_signal(number)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_death_of_the_leader_costs_no_answer(fleet: Fleet):
    leader, epoch = await leader_of(fleet.stack), (await lease_of(fleet.stack)).epoch
    restarts = leader.restarts
    answers = Streams(fleet.client)
    await answers.begun()
    send(leader, signal.SIGKILL)
    late = await stream(fleet.client, *ASKED[0])  # no scheduler answers when it comes
    await fleet.check(await answers.ended(), "SIGKILL")
    assert late.ids == fleet.undisturbed[0]
    first_s = late.times_s[1] - late.times_s[0]
    print(f"SIGKILL: a request that came meanwhile had its first token after {first_s:.2f} s")
    assert (await lease_of(fleet.stack)).epoch > epoch
    await eventually(lambda: leader.restarts == restarts + 1 and leader.serving)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_leader_that_was_paused_past_its_lease_does_no_harm(fleet: Fleet):
    leader, epoch = await leader_of(fleet.stack), (await lease_of(fleet.stack)).epoch
    restarts = leader.restarts
    answers = Streams(fleet.client)
    await answers.begun()
    send(leader, signal.SIGSTOP)
    await eventually(lambda: fleet.another_leads(epoch), what="no other scheduler leads")
    send(leader, signal.SIGCONT)
    late = await stream(fleet.client, *ASKED[5])
    await fleet.check(await answers.ended(), "SIGSTOP")
    assert late.ids == fleet.undisturbed[5]
    await eventually(lambda: leader.restarts == restarts + 1, what="the former leader goes on")


async def restart_leader(fleet: Fleet) -> None:
    """Ends the leader as a rolling update does, and waits for its new process."""
    leader, epoch = await leader_of(fleet.stack), (await lease_of(fleet.stack)).epoch
    restarts = leader.restarts
    send(leader, signal.SIGTERM)
    await eventually(lambda: fleet.another_leads(epoch), what="no other scheduler leads")
    await eventually(lambda: leader.restarts == restarts + 1 and leader.serving)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_rolling_restart_costs_no_request(fleet: Fleet):
    answers = Streams(fleet.client)
    await answers.begun()
    await restart_leader(fleet)
    await restart_leader(fleet)
    await fleet.check(await answers.ended(), "SIGTERM")
