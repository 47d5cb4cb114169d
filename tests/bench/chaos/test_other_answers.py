"""Answers that no client can resume: how they are joined, compared, and how they end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from millrace.bench.chaos.answers import Answer, Ask, stream
from millrace.bench.chaos.command import ANSWERS
from millrace.bench.chaos.other_answers import OtherAnswer, difference

Answering = Callable[[httpx.Request], httpx.Response]
DONE = b"data: [DONE]\n\n"
CHOICES = Ask(1, (1, 2), 3, kind="choices")
LATER = httpx.Response(503, headers={"retry-after": "0"}, text="later")


def of(*events: dict[str, Any], end: bytes = DONE, breaks: bool = False) -> httpx.Response:
    """A stream of events; with `breaks`, its connection is lost after them."""

    async def body() -> AsyncIterator[bytes]:
        for event in events:
            yield b"data: %s\n\n" % json.dumps(event).encode()
        if breaks:
            raise httpx.ReadError("lost")
        yield end

    return httpx.Response(200, content=body())


def choice(index: int, *token_ids: int, **more: Any) -> dict[str, Any]:
    """An event with tokens of a choice; `id` differs in each answer."""
    text = "".join(map(str, token_ids))
    part = {"index": index, "text": text, "token_ids": list(token_ids), **more}
    return {"id": f"{id(part)}", "choices": [part]}


async def ended(
    ask: Ask, *answers: httpx.Response | Exception, expected: OtherAnswer | None = None
) -> tuple[Answer, list[httpx.Request]]:
    """How an answer ends whose requests are answered by these; and the requests."""
    asked: list[httpx.Request] = []
    left: Iterator[httpx.Response | Exception] = iter(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await stream(client, ask, expected), asked


def test_a_kind_has_its_own_request() -> None:
    found = {kind: Ask(1, (1, 2), 3, kind=kind) for kind in ANSWERS}
    assert {ask.path for ask in found.values()} == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/batches",
    }
    bodies = [json.dumps(ask.body()) for ask in found.values()]
    assert len(set(bodies)) == len(ANSWERS)


async def test_events_of_several_choices_are_joined() -> None:
    first = of(choice(0, 1), choice(1, 2), choice(0, 3, finish_reason="length"))
    other = of(choice(1, 2), choice(0, 1, 3, finish_reason="length"))
    alone, _ = await ended(CHOICES, first)
    again, _ = await ended(CHOICES, other, expected=alone.read)
    assert alone.end == again.end == "right" and len(again.read.token_ids) == 3


async def test_another_token_is_wrong() -> None:
    alone, _ = await ended(CHOICES, of(choice(0, 1), choice(1, 2)))
    found, _ = await ended(CHOICES, of(choice(0, 1), choice(1, 4)), expected=alone.read)
    assert found.end == "wrong" and ".1.text: 4, not 2" in found.detail


@pytest.mark.parametrize("end", [{"breaks": True}, {"end": b""}])
async def test_an_answer_whose_connection_breaks_is_cut(end) -> None:
    found, asked = await ended(CHOICES, of(choice(0, 1), **end))
    assert found.end == "cut" and len(asked) == 1


async def test_what_was_refused_or_never_heard_is_asked_again() -> None:
    broken = (httpx.ConnectError("no"), AttributeError("'NoneType' has no 'getpeername'"))
    found, asked = await ended(CHOICES, LATER, *broken, of(choice(0, 1)))
    assert found.end == "right" and found.read.refusals == 1 and found.read.breaks == 2
    assert len(asked) == 4


async def test_an_error_ends_it() -> None:
    event = {"error": {"message": "no more"}}
    found, _ = await ended(CHOICES, of(choice(0, 1), event))
    assert found.end == "error" and "no more" in found.detail
    found, _ = await ended(CHOICES, httpx.Response(400, text="what?"))
    assert found.end == "error" and "what?" in found.detail


def event(number: int, kind: str, **response: Any) -> dict[str, Any]:
    told = {"id": f"resp_{number}", **response}
    return {"type": f"response.{kind}", "sequence_number": number, "response": told}


async def test_a_response_is_its_last_event() -> None:
    ask = Ask(1, (1, 2), 3, kind="response")
    alone, _ = await ended(ask, of(event(1, "completed", output=["a"]), end=b""))
    found, _ = await ended(ask, of(event(4, "completed", output=["a"])), expected=alone.read)
    assert found.end == "right"
    found, _ = await ended(ask, of(event(1, "failed", error="lost its replica")))
    assert found.end == "error" and "lost its replica" in found.detail


async def test_a_response_in_the_background_is_read_again() -> None:
    ask = Ask(1, (1, 2), 3, kind="background")
    begun = event(3, "in_progress", id="resp_7")
    last = event(5, "completed", id="resp_7", output=["a"])
    found, asked = await ended(ask, of(begun, breaks=True), LATER, of(last, end=b""))
    assert found.end == "right" and found.read.breaks == found.read.refusals == 1
    assert [str(one.url) for one in asked[1:]] == 2 * [
        "http://x/v1/responses/resp_7?stream=true&starting_after=3"
    ]
    found, _ = await ended(ask, of(begun, breaks=True), httpx.Response(404, text="gone"))
    assert found.end == "lost"


async def test_a_batch_is_polled_and_its_output_compared() -> None:
    ask = Ask(1, (1, 2), 3, kind="batch")
    running = {"id": "batch_1", "status": "in_progress"}
    done = {"id": "batch_1", "status": "completed", "error_file_id": None, "output_file_id": "f"}
    lines = [{"custom_id": str(n), "response": {"body": {"id": n, "text": n}}} for n in (1, 0)]

    def answers(*last: dict[str, Any]) -> list[httpx.Response | Exception]:
        content = "\n".join(map(json.dumps, last))
        steps = ({"id": "file-1"}, running, done)
        return [
            *(httpx.Response(200, json=one) for one in steps),
            httpx.Response(200, text=content),
        ]

    alone, asked = await ended(ask, *answers(*lines))
    assert alone.end == "right"
    assert [f"{one.method} {one.url.path}" for one in asked] == [
        "POST /v1/files",
        "POST /v1/batches",
        "GET /v1/batches/batch_1",
        "GET /v1/files/f/content",
    ]
    found, _ = await ended(ask, *answers(*reversed(lines)), expected=alone.read)
    assert found.end == "right"
    found, _ = await ended(ask, *answers(lines[0]), expected=alone.read)
    assert found.end == "wrong"


@pytest.mark.parametrize(
    ("batch", "content", "detail"),
    [
        ({"status": "completed", "error_file_id": "e"}, (200, "line 1 failed"), "line 1 failed"),
        ({"status": "failed", "error_file_id": None}, None, "'failed'"),
        ({"status": "completed", "error_file_id": None}, (500, "no file"), "no file"),
    ],
)
async def test_a_batch_without_its_whole_output_is_an_error(
    batch: dict[str, Any], content: tuple[int, str] | None, detail: str
) -> None:
    output = "f" if batch["status"] == "completed" else None
    steps = [
        httpx.Response(200, json={"id": "file-1"}),
        httpx.Response(200, json={"id": "batch_1", "output_file_id": output, **batch}),
    ]
    if content is not None:
        steps.append(httpx.Response(content[0], text=content[1]))
    found, _ = await ended(Ask(1, (1, 2), 3, kind="batch"), *steps)
    assert found.end == "error" and detail in found.detail


async def test_silence_is_hung() -> None:
    read = OtherAnswer("/v1/completions", {"stream": True})
    transport = httpx.MockTransport(lambda request: LATER)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        with pytest.raises(TimeoutError):
            await read.read(client, silence_s=0.2)


def test_where_two_answers_differ() -> None:
    assert difference({"a": [1, 2.00001]}, {"a": [1, 2.0]}) == ""
    assert difference({"a": [1, 2.1]}, {"a": [1, 2.0]}) == ".a[1]: 2.1, not 2.0"
    assert difference({"a": 1}, {}).endswith("not {}")
