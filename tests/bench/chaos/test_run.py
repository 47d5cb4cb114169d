"""`millrace bench chaos`: the ends of answers, the choice of faults, and a short run of a stack."""

from __future__ import annotations

import json
from itertools import islice

import httpx
import pytest
from rich.console import Console

from millrace.bench.chaos.answers import Ask, asks, stream
from millrace.bench.chaos.command import DEFAULT_TARGETS, TARGETS, Settings
from millrace.bench.chaos.faults import drawn
from millrace.bench.chaos.report import draw, print_tables
from millrace.bench.chaos.run import run
from support.deadlines import HANG_S
from support.sse_server import Exchange, SseServer, running

ASK = Ask(0, (1, 2), 3, None)
RIGHT_EVENTS = [{"choices": [{"token_ids": [7]}]}, {"choices": [{"token_ids": [8, 9]}]}]


def of_events(*events: object, ended: bool = True):
    """Answers with a stream of these events."""

    def answer(exchange: Exchange) -> None:
        exchange.start_events()
        for event in events:
            exchange.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        if ended:
            exchange.chunk(b"data: [DONE]\n\n")
            exchange.end_events()
        else:
            exchange.writer.close()

    return answer


@pytest.mark.parametrize(
    ("answer", "end", "detail"),
    [
        (of_events(*RIGHT_EVENTS), "right", ""),
        (of_events(RIGHT_EVENTS[0]), "wrong", "1 tokens of 3; the first 1 are right"),
        (
            of_events(RIGHT_EVENTS[0], {"choices": [{"token_ids": [8, 6]}]}),
            "wrong",
            "3 tokens of 3; the first 2 are right",
        ),
        (of_events({"error": {"message": "lost"}}), "error", "lost"),
        (of_events(RIGHT_EVENTS[0], ended=False), "cut", "Error"),
        (lambda exchange: exchange.send_json({"error": {}}, 503), "refused", "error"),
        (lambda exchange: exchange.send_json({"error": {}}, 500), "error", "error"),
    ],
)
async def test_an_answer_ends_in_one_of_these_ways(answer, end, detail) -> None:
    async with (
        running(SseServer(answer=answer)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client,
    ):
        found = await stream(client, ASK, [7, 8, 9])
    assert found.end == end and detail in found.detail


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
        prompts=2,
        prompt_tokens=40,
        output_tokens=20,
    )
    said: list[str] = []
    document = await run(settings, said.append)
    assert json.loads(json.dumps(document))["ends"] == document["ends"]
    assert document["ends"]["right"] and not document["leaks"]
    assert not document["ends"]["wrong"] and not document["ends"]["cut"]
    assert all(one["recovery_s"] is not None for one in document["struck"])
    assert any("undisturbed answers" in line for line in said)
    console = Console(record=True, width=160)
    print_tables(document, console)
    assert f"{document['requests']} requests" in console.export_text()
    draw(document, tmp_path / "chaos.png")
    assert (tmp_path / "chaos.png").stat().st_size > 1000
