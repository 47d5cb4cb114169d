"""A lasting client: what it asks after each way in which an answer may stop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence

import httpx
import pytest

from millrace.bench.common.lasting_answer import LastingAnswer
from support.deadlines import HANG_S
from support.sse_server import Exchange, SseServer, of_events, of_status, running

PATH = "/v1/completions"
FIRST = ("1-a", {"choices": [{"token_ids": [7]}]})
LAST = ("2-b", {"choices": [{"token_ids": [8, 9], "finish_reason": "length"}]})
Answering = Callable[[Exchange], None]


def events(*sent: tuple[str, object], ends: bool = False) -> Answering:
    return of_events(*sent, ends=ends)


def error(code: str) -> tuple[str, object]:
    return "", {"error": {"code": code, "message": f"it is {code}"}}


def status(number: int) -> Answering:
    return of_status(number, "no")


async def read(
    answers: Sequence[Answering], silence_s: float = HANG_S
) -> tuple[LastingAnswer, list[Exchange]]:
    """Reads an answer of a server that gives these, one after the other; and what it was asked."""
    asked: list[Exchange] = []

    def answer(exchange: Exchange) -> None:
        asked.append(exchange)
        answers[len(asked) - 1](exchange)

    async with (
        running(SseServer(answer=answer)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client,
    ):
        made = LastingAnswer(PATH, {"prompt": [1, 2]})
        return await made.read(client, silence_s=silence_s), asked


def resumed(exchange: Exchange) -> str | None:
    """The event after which a stream is resumed; "" for its beginning; None: it is asked again."""
    if exchange.method == "POST":
        assert exchange.path == PATH and json.loads(exchange.body)["stream"]
        return None
    return exchange.headers.get("last-event-id", "")


@pytest.mark.parametrize(
    ("stopped", "then"),
    [
        (events(FIRST), "1-a"),
        (events(), ""),  # accepted, and no event came
        (events(FIRST, error("continued_elsewhere")), "1-a"),
        (events(FIRST, error("unavailable")), "1-a"),
        (events(error("continued_elsewhere")), ""),
        (events(error("unavailable")), None),  # refused: the id is free
        (status(503), None),
        (status(502), None),
        (status(429), None),
        (status(409), ""),  # accepted, and its 200 was lost
    ],
)
async def test_it_goes_on_where_it_was_stopped(stopped: Answering, then: str | None) -> None:
    rest = (LAST,) if then else (FIRST, LAST)
    answer, asked = await read([stopped, events(*rest, ends=True)])
    assert answer.content == ([7, 8, 9], "", "length", "")
    assert [resumed(one) for one in asked] == [None, then]
    chosen = {one.headers.get("x-millrace-request-id") or one.path.split("/")[3] for one in asked}
    assert chosen == {answer.chosen_id}


async def test_it_waits_as_long_as_a_refusal_says() -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.send(b"HTTP/1.1 503 X\r\nretry-after: 3600\r\ncontent-length: 0\r\n\r\n")

    with pytest.raises(TimeoutError):
        await read([refuse, events(FIRST, LAST, ends=True)], silence_s=0.2)


@pytest.mark.parametrize(
    ("answers", "said", "code"),
    [
        ([events(FIRST, error("failed"))], "it is failed", 0),
        ([events(FIRST), status(404)], '{"error": {"message": "no"}}', 404),
        ([events(), status(404)], '{"error": {"message": "no"}}', 404),  # it had a 200
        ([status(400)], '{"error": {"message": "no"}}', 400),
    ],
)
async def test_other_errors_end_it(answers: list[Answering], said: str, code: int) -> None:
    answer, asked = await read(answers)
    assert (answer.error, answer.status) == (said, code)
    assert len(asked) == len(answers)


async def test_an_id_that_is_free_again_is_used_again() -> None:
    answer, asked = await read([status(409), status(404), events(FIRST, LAST, ends=True)])
    assert [resumed(one) for one in asked] == [None, "", None]
    assert (answer.content, answer.forgotten) == (([7, 8, 9], "", "length", ""), 1)


async def test_a_silent_stream_raises() -> None:
    with pytest.raises(TimeoutError):
        await read([lambda exchange: exchange.start_events()], silence_s=0.2)


async def test_it_counts_what_came_between() -> None:
    last = events(LAST, ends=True)
    stopped = [status(503), events(FIRST), events(error("unavailable")), last]
    answer, _ = await read(stopped)
    assert (answer.refusals, answer.breaks) == (1, 1)
    assert answer.interruptions == ["it is unavailable"]


async def test_arguments_of_a_call_are_joined() -> None:
    def call(text: str) -> dict[str, object]:
        return {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": text}}]}}]}

    answer, _ = await read(
        [events(("1-a", call('{"a"'))), events(("2-b", call(": 1}")), ends=True)]
    )
    assert answer.arguments == '{"a": 1}'


async def test_the_longest_pause_is_measured_from_its_watch() -> None:
    asked, waited = asyncio.Event(), asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        asked.set()
        await waited.wait()
        events(FIRST, LAST, ends=True)(exchange)

    async with (
        running(SseServer(answer=slow)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client,
    ):
        made = LastingAnswer(PATH, {"prompt": [1, 2]})
        reading = asyncio.create_task(made.read(client, silence_s=HANG_S))
        await asked.wait()
        asked_s = time.monotonic()
        await asyncio.sleep(0.05)
        least_s = time.monotonic() - asked_s
        waited.set()
        await reading
        assert made.longest_pause_s >= least_s
        made.watch()
        assert made.longest_pause_s == 0.0
