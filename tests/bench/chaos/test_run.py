"""`millrace bench chaos`: the ends of answers, the choice of faults, and a short run of a stack."""

from __future__ import annotations

import json
from itertools import islice

import httpx
import pytest
from rich.console import Console

from millrace.bench.chaos.answers import Ask, asks, is_answered, stream
from millrace.bench.chaos.command import DEFAULT_TARGETS, TARGETS, Settings
from millrace.bench.chaos.faults import drawn
from millrace.bench.chaos.report import draw, print_tables
from millrace.bench.chaos.run import run
from millrace.bench.common.lasting_answer import LastingAnswer
from support.deadlines import HANG_S
from support.sse_server import SseServer, of_events, of_status, running

ASK = Ask(0, (1, 2), 3)
RIGHT_EVENTS = [{"choices": [{"token_ids": [7]}]}, {"choices": [{"token_ids": [8, 9]}]}]


def of(*events: object):
    """Answers with a stream of these events."""
    return of_events(*((f"{number}-a", event) for number, event in enumerate(events)))


@pytest.mark.parametrize(
    ("answer", "end", "detail"),
    [
        (of(*RIGHT_EVENTS), "right", ""),
        (of(RIGHT_EVENTS[0]), "wrong", "1 tokens of 3, finish ''; the first 1 are right"),
        (
            of(RIGHT_EVENTS[0], {"choices": [{"token_ids": [8, 6]}]}),
            "wrong",
            "3 tokens of 3, finish ''; the first 2 are right",
        ),
        (
            of(*RIGHT_EVENTS, {"choices": [{"finish_reason": "stop"}]}),
            "wrong",
            "3 tokens of 3, finish 'stop'; the first 3 are right",
        ),
        (of({"error": {"code": "failed", "message": "no more"}}), "error", "no more"),
        (of_status(500, "gone"), "error", "gone"),
        (of_status(404, "gone"), "lost", "gone"),
    ],
)
async def test_an_answer_ends_in_one_of_these_ways(answer, end, detail) -> None:
    expected = LastingAnswer("", {}, token_ids=[7, 8, 9])
    async with (
        running(SseServer(answer=answer)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client,
    ):
        found = await stream(client, ASK, expected)
    assert found.end == end and detail in found.detail


@pytest.mark.parametrize(("number", "is_answered_"), [(200, True), (503, False), (400, False)])
async def test_a_stack_has_recovered_when_a_request_is_answered(number, is_answered_) -> None:
    async with (
        running(SseServer(answer=of_status(number, "gone"))) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client,
    ):
        assert await is_answered(client, ASK) == is_answered_
    async with httpx.AsyncClient(base_url=server.url) as client:  # nobody listens there now
        assert not await is_answered(client, ASK)


def test_prompts_are_greedy_sampled_and_constrained() -> None:
    made = asks(Settings(prompts=8), 100)
    assert [one.seed for one in made] == [None, 1, None, 3, None, 5, None, 7]
    assert [bool(one.turns) for one in made] == [False, False, False, True] * 2
    assert "ignore_eos" in made[0].body() and "structured_outputs" in made[3].body()


def test_every_kind_of_answer_is_asked() -> None:
    made = asks(Settings(prompts=8, answers=("completion", "tool")), 100)
    assert [one.kind for one in made] == ["completion", "tool"] * 4
    assert [bool(one.turns) for one in made] == [False] * 6 + [True] * 2


def test_settings_are_of_all_services_or_of_a_role() -> None:
    given = ["decode:engine.stages=2", "engine.stages=1", "store.url=redis://x", "decode:a.b=c"]
    found = Settings(stack_settings=given).role_settings()
    assert found == {
        "": ["engine.stages=1", "store.url=redis://x"],
        "decode": ["engine.stages=2", "a.b=c"],
    }


def test_the_seed_alone_decides_prompts_and_faults() -> None:
    first, again = (list(islice(drawn(Settings(seed=3)), 200)) for _ in range(2))
    assert first == again
    assert first != list(islice(drawn(Settings(seed=4)), 200))
    assert {fault.target for fault in first} == set(DEFAULT_TARGETS)
    assert {fault.kind for fault in first} == {"kill", "stop"}
    assert asks(Settings(seed=3), 100) == asks(Settings(seed=3), 100)
    assert set(DEFAULT_TARGETS) < set(TARGETS)


async def test_a_short_run_loses_nothing(tmp_path) -> None:
    settings = Settings(
        minutes=0.05,
        targets=("prefill", "store"),
        decode=1,
        streams=3,
        prompts=4,
        prompt_tokens=40,
        output_tokens=20,
    )
    said: list[str] = []
    document = await run(settings, said.append)
    assert json.loads(json.dumps(document))["ends"] == document["ends"]
    assert document["ends"]["right"] and not document["leaks"]
    assert document["ends"]["right"] == document["requests"]
    assert all(one["recovery_s"] is not None for one in document["struck"])
    assert any("undisturbed answers" in line for line in said)
    console = Console(record=True, width=160)
    print_tables(document, console)
    assert f"{document['requests']} requests" in console.export_text()
    draw(document, tmp_path / "chaos.png")
    assert (tmp_path / "chaos.png").stat().st_size > 1000
