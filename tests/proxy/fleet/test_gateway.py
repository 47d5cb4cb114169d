"""The proxy when clients leave, and when the fleet refuses, places again, breaks or returns."""

from __future__ import annotations

import asyncio
import gc
import weakref

import orjson
import pytest

from millrace.core.incarnation import Incarnation
from millrace.core.request import RequestState
from millrace.core.scheduler.fleet.prompt_progress import PromptProgress
from millrace.event_lines import event_lines
from millrace.state.store import StoreError
from millrace.wire.fleet_messages import Progress
from support.deadlines import HANG_S
from support.gateway import MODEL, Script, gateway
from support.live_stack import eventually

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
OBJECTIVES = {"x-millrace-ttft-slo-ms": "60000", "x-millrace-e2e-slo-ms": "90000"}
STREAM = {**BODY, "stream": True}


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path, "proxy.max_inflight=3") as running:
        yield running


@pytest.fixture
async def talkative(tmp_path):
    """A gateway whose silent streams get comments and progress events at once."""
    settings = ("proxy.keepalive_s=0.05", "proxy.progress_interval_s=0.05")
    async with gateway(tmp_path, *settings) as running:
        yield running


@pytest.fixture
async def impatient(tmp_path):
    """A gateway that waits for one second for the scheduler's answer to a submission."""
    async with gateway(tmp_path, "proxy.submit_timeout_s=1") as running:
        yield running


def error(response):
    return response.json()["error"]


async def lines(response):
    return [orjson.loads(line[6:]) async for line in event_lines(response) if line[:7] == "data: {"]


async def test_leaving_a_stream_cancels_it(stack):
    stack.fleet.script = Script(hold=asyncio.Event())
    async with stack.http.stream("POST", CHAT, json=STREAM) as response:
        await anext(event_lines(response))
        [spec] = stack.fleet.specs
    await asyncio.wait_for(stack.fleet.cancelled.wait(), HANG_S)
    assert stack.fleet.cancels[0].request_id == spec.request_id
    assert stack.fleet.cancels[0].reason == "disconnected"
    await stack.idle()
    await until_gone(stack, spec)


async def test_records_of_open_requests_live_on(tmp_path, monkeypatch):
    """But not those of resumable streams, which outlive their proxy."""
    monkeypatch.setattr("millrace.proxy.fleet.gateway.RENEW_S", 0.02)
    renewed = []

    async def renew(request_ids):
        renewed.append(request_ids)

    async with gateway(tmp_path) as stack:
        monkeypatch.setattr(stack.proxy.store, "renew", renew)
        hold = asyncio.Event()
        stack.fleet.script = Script(hold=hold)
        posts = [
            asyncio.create_task(stack.http.post(CHAT, json=STREAM, headers=headers))
            for headers in ({}, {"x-millrace-resumable": "1"})
        ]
        await eventually(lambda: len(stack.fleet.specs) == 2)
        [plain] = [r for r in stack.proxy.gateway.requests if not r.kept]
        [kept] = [r for r in stack.proxy.gateway.requests if r.kept]
        await eventually(lambda: [kept.request_id] in renewed)  # once, by its stream
        renewed.clear()
        await eventually(lambda: len(renewed) > 1)
        assert renewed == [[plain.request_id]] * len(renewed)
        hold.set()
        await asyncio.gather(*posts)
        await stack.idle()


async def until_gone(stack, spec):
    async def gone():
        return await stack.state_of(spec.request_id) is None

    await eventually(gone)


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_leaving_before_the_first_token_cancels(stack, body):
    stack.fleet.script = Script(on_submit=stack.fleet.place)
    asking = asyncio.create_task(stack.http.post(CHAT, json=body))
    await asyncio.wait_for(stack.fleet.submitted.wait(), HANG_S)
    asking.cancel()
    await asyncio.wait_for(stack.fleet.cancelled.wait(), HANG_S)
    await until_gone(stack, stack.fleet.specs[0])


async def test_leaving_while_prompts_are_submitted_leaves_nothing(stack, monkeypatch):
    """The client leaves while the store takes the first prompt: the second is not submitted."""
    create, created, going_on = stack.proxy.store.create, asyncio.Event(), asyncio.Event()
    recorded = []

    async def slow(request_id, **fields):
        created.set()
        await going_on.wait()
        await create(request_id, **fields)
        recorded.append(request_id)

    async def gone():
        return recorded and await stack.state_of(recorded[0]) is None

    monkeypatch.setattr(stack.proxy.store, "create", slow)
    body = {"model": MODEL, "prompt": ["one", "two"]}
    asking = asyncio.create_task(stack.http.post("/v1/completions", json=body))
    await asyncio.wait_for(created.wait(), HANG_S)
    assert stack.proxy.models.inflight == 1
    asking.cancel()
    await eventually(lambda: not stack.proxy.models.inflight)
    going_on.set()
    await eventually(gone)
    assert not stack.proxy.models.inflight and not stack.fleet.specs
    stack.proxy.gateway.check_integrity()


async def test_finished_requests_are_finished_in_the_store(stack):
    await stack.http.post(CHAT, json=BODY)
    [spec] = stack.fleet.specs

    async def finished():
        return await stack.state_of(spec.request_id) == "finished"

    await eventually(finished)
    record = await stack.proxy.store.get(spec.request_id)
    assert record.prompt_tokens == spec.prompt_tokens
    with pytest.raises(StoreError):
        await stack.proxy.store.prompt_ids(spec.request_id)
    assert not stack.fleet.cancels


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("overloaded", 429, "7"),
        ("too_large", 400, None),
        ("invalid", 400, None),
    ],
)
@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_refusals(stack, code, status, retry, body):
    stack.fleet.script = Script(
        on_submit=lambda spec: stack.fleet.refuse(spec, code, "no room", retry_after_s=7)
    )
    response = await stack.http.post(CHAT, json=body)
    assert (response.status_code, error(response)["code"]) == (status, code)
    assert error(response)["message"] == "no room"
    assert response.headers.get("retry-after") == retry


async def test_a_request_that_waits_for_room_is_not_given_up(impatient):
    """The scheduler has answered: a long wait for a decode instance is not silence."""

    def submitted(spec):
        impatient.fleet.queue(spec)
        asyncio.get_running_loop().call_later(1.7, impatient.fleet.place, spec)
        asyncio.get_running_loop().call_later(1.7, impatient.fleet.play_later, spec)

    impatient.fleet.script = Script(on_submit=submitted)
    response = await impatient.http.post(CHAT, json=BODY)
    assert response.status_code == 200 and not impatient.fleet.cancels


async def test_too_many_at_once(stack):
    stack.fleet.script = Script(hold=asyncio.Event(), hold_after=0)
    asking = [asyncio.create_task(stack.http.post(CHAT, json=BODY)) for _ in range(3)]
    await eventually(lambda: len(stack.fleet.specs) == 3)
    response = await stack.http.post(CHAT, json=BODY)
    assert (response.status_code, error(response)["type"]) == (429, "rate_limit_error")
    assert "retry-after" in response.headers
    stack.fleet.script.hold.set()
    assert [(await task).status_code for task in asking] == [200] * 3
    assert (await stack.http.post(CHAT, json=BODY)).status_code == 200


async def test_prompts_count_against_the_limit(stack):
    body = {"model": MODEL, "prompt": ["a"] * 4}
    assert (await stack.http.post("/v1/completions", json=body)).status_code == 429


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_failure_before_the_first_token_is_a_500(stack, body):
    def submitted(spec):
        stack.fleet.place(spec)
        stack.fleet.fail(spec, "prefill died three times")

    stack.fleet.script = Script(on_submit=submitted)
    response = await stack.http.post(CHAT, json=body)
    assert (response.status_code, error(response)["message"]) == (500, "prefill died three times")


async def test_failure_in_a_stream_is_its_last_event(stack):
    stack.fleet.script = Script(hold=asyncio.Event())
    async with stack.http.stream("POST", CHAT, json=STREAM) as response:
        await stack.begun()
        stack.fleet.fail(stack.fleet.specs[0], "decode died")
        events = await lines(response)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["error"]["message"] == "decode died"


async def test_error_event_of_decode(stack):
    def submitted(spec):
        stack.fleet.place(spec)
        stack.fleet.end(spec, "error", "KV was lost")

    stack.fleet.script = Script(on_submit=submitted)
    response = await stack.http.post(CHAT, json=BODY)
    assert (response.status_code, error(response)["message"]) == (500, "KV was lost")


async def test_one_prompt_s_failure_cancels_the_others(stack):
    def submitted(spec):
        if spec.request_id.endswith("-1"):
            stack.fleet.fail(spec, "lost")

    stack.fleet.script = Script(on_submit=submitted)
    body = {"model": MODEL, "prompt": ["a", "b", "c"]}
    response = await stack.http.post("/v1/completions", json=body)
    assert response.status_code == 500
    await eventually(lambda: len(stack.fleet.cancels) == 2)
    assert {c.request_id[-2:] for c in stack.fleet.cancels} == {"-0", "-2"}


async def test_no_answer_in_time(impatient):
    impatient.fleet.script = Script(on_submit=lambda spec: None)
    response = await impatient.http.post(CHAT, json=BODY)
    assert response.status_code == 503
    assert "did not answer" in error(response)["message"]
    await asyncio.wait_for(impatient.fleet.cancelled.wait(), HANG_S)


async def test_placed_again_before_the_first_token(stack):
    def submitted(spec):
        stack.fleet.decode = Incarnation("decode-9", 7)
        stack.fleet.place(spec)
        stack.fleet.decode = Incarnation("decode-0", 1)
        stack.fleet.place(spec)
        stack.fleet.play_later(spec)

    stack.fleet.script = Script(on_submit=submitted)
    response = await stack.http.post(CHAT, json=BODY)
    assert response.json()["choices"][0]["message"]["content"] == "Hello there"


async def test_the_answer_of_an_earlier_attempt_ends_the_next_one(stack):
    """The scheduler had lost the instance from sight, and began the request there again."""
    stack.fleet.script = Script(on_submit=stack.fleet.place)
    asking = asyncio.create_task(stack.http.post(CHAT, json=BODY))
    await asyncio.wait_for(stack.fleet.submitted.wait(), HANG_S)
    [spec] = stack.fleet.specs
    stack.fleet.place(spec)
    await eventually(lambda: all(one.begun_again for one in stack.proxy.gateway.requests))
    stack.fleet.play_later(spec)
    response = await asking
    assert response.json()["choices"][0]["message"]["content"] == "Hello there"
    await asyncio.wait_for(stack.fleet.cancelled.wait(), HANG_S)
    told = [(one.request_id, one.reason) for one in stack.fleet.cancels]
    assert told == [(spec.request_id, "stop")]


async def test_tokens_of_an_instance_it_left_are_ignored(stack):
    other = Incarnation("decode-9", 7)

    def submitted(spec):
        stack.fleet.decode, kept = other, stack.fleet.decode
        stack.fleet.place(spec)
        stack.fleet.decode = kept
        stack.fleet.play_later(spec)  # over the stream of decode-0

    stack.fleet.script = Script(on_submit=submitted)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stack.http.post(CHAT, json=BODY), 0.3)


async def test_tokens_may_overtake_a_second_placement(stack):
    def submitted(spec):
        stack.fleet.decode, kept = (
            Incarnation("decode-9", 7),
            stack.fleet.decode,
        )
        stack.fleet.place(spec)
        stack.fleet.decode = kept
        stack.fleet.play_later(spec)
        asyncio.get_running_loop().call_later(0.05, stack.fleet.place, spec)

    stack.fleet.script = Script(on_submit=submitted)
    response = await stack.http.post(CHAT, json=BODY)
    assert response.json()["choices"][0]["message"]["content"] == "Hello there"


async def test_an_answer_may_come_before_its_placement(stack):
    """Tokens and placements come on different streams. A second placement is one too many."""
    stack.fleet.script.on_submit = stack.fleet.play_later
    assert (await stack.http.post(CHAT, json=BODY)).status_code == 200
    [spec] = stack.fleet.specs
    stack.fleet.place(spec)
    stack.fleet.script.on_submit = None
    assert (await stack.http.post(CHAT, json=BODY)).status_code == 200  # the placement was heard
    assert not stack.fleet.cancels
    stack.fleet.place(spec)
    await asyncio.wait_for(stack.fleet.cancelled.wait(), HANG_S)
    assert [one.request_id for one in stack.fleet.cancels] == [spec.request_id]


async def test_a_request_that_is_placed_after_its_answer_is_cancelled(stack):
    """The scheduler had lost the instance from sight, which computed the answer meanwhile."""
    assert (await stack.http.post(CHAT, json=BODY)).status_code == 200
    [spec] = stack.fleet.specs
    stack.fleet.place(spec)
    await asyncio.wait_for(stack.fleet.cancelled.wait(), HANG_S)
    assert stack.fleet.cancels[0].request_id == spec.request_id


async def test_tokens_may_overtake_their_placement(stack):
    def submitted(spec):
        stack.fleet.play_later(spec)
        asyncio.get_running_loop().call_later(0.05, stack.fleet.place, spec)

    stack.fleet.script = Script(on_submit=submitted)
    response = await stack.http.post(CHAT, json=BODY)
    assert response.json()["choices"][0]["message"]["content"] == "Hello there"


async def test_broken_token_stream_waits_for_a_new_place(stack):
    stack.fleet.script = Script(on_submit=stack.fleet.place)
    asking = asyncio.create_task(stack.http.post(CHAT, json=BODY))
    await stack.placed()
    await stack.fleet.stop_decode()
    await asyncio.sleep(0.05)
    stack.fleet.decode = Incarnation("decode-0", 2)
    await stack.fleet.start_decode()
    stack.fleet.announce(ready=True)
    [spec] = stack.fleet.specs
    stack.fleet.place(spec)
    stack.fleet.play_later(spec)
    assert (await asking).json()["choices"][0]["message"]["content"] == "Hello there"


async def test_broken_token_stream_without_a_new_place_is_submitted_anew(impatient):
    impatient.fleet.script = Script(on_submit=impatient.fleet.place)
    asking = asyncio.create_task(impatient.http.post(CHAT, json=BODY))
    await impatient.placed()
    await impatient.fleet.stop_decode()
    impatient.fleet.script = Script()
    await asyncio.wait_for(impatient.fleet.cancelled.wait(), HANG_S)
    await impatient.fleet.start_decode()
    assert (await asking).json()["choices"][0]["message"]["content"] == "Hello there"
    first, second = impatient.fleet.specs
    assert (second.prompt_tokens, second.resumed_tokens) == (first.prompt_tokens, 0)


async def test_without_a_scheduler_for_long_requests_end(impatient):
    impatient.fleet.script = Script(on_submit=impatient.fleet.place)
    asking = asyncio.create_task(impatient.http.post(CHAT, json=BODY))
    await impatient.placed()
    await impatient.fleet.stop_scheduler()
    assert (await asking).status_code == 503
    response = await impatient.http.post(CHAT, json=BODY)
    assert (response.status_code, error(response)["code"]) == (503, "unavailable")
    assert "retry-after" in response.headers
    assert (await impatient.http.get("/ready")).status_code == 503
    assert (await impatient.http.get("/health")).status_code == 200
    await impatient.fleet.start_scheduler()
    await eventually(lambda: impatient.proxy.gateway.ready)
    impatient.fleet.script = Script()
    assert (await impatient.http.post(CHAT, json=BODY)).status_code == 200


async def test_requests_wait_for_the_next_scheduler(stack):
    """One is placed, one comes while no scheduler answers: both are named to the next one."""
    stack.fleet.script = Script(on_submit=stack.fleet.place)
    placed = asyncio.create_task(stack.http.post(CHAT, json=BODY))
    await stack.placed()
    await stack.fleet.stop_scheduler()
    await eventually(lambda: not stack.proxy.gateway.connected)
    late = asyncio.create_task(stack.http.post(CHAT, json=BODY))
    await eventually(lambda: stack.proxy.gateway.inflight == 2)
    assert (await stack.http.get("/ready")).status_code == 200
    stack.fleet.script, stack.fleet.forgets = Script(), True
    await stack.fleet.start_scheduler()
    for answer in await asyncio.gather(placed, late):
        assert answer.json()["choices"][0]["message"]["content"] == "Hello there"
    first, second = stack.fleet.reopened
    assert first.decode == stack.fleet.decode and second.decode is None
    assert first.token_age_s is None and first.age_s >= second.age_s >= 0.0


async def test_a_scheduler_that_goes_on_with_a_stream_is_not_asked_again(stack):
    stack.fleet.script = Script(hold=asyncio.Event())
    async with stack.http.stream("POST", CHAT, json=STREAM) as response:
        await stack.begun()
        await stack.fleet.stop_scheduler()
        await eventually(lambda: not stack.proxy.gateway.connected)
        await stack.fleet.start_scheduler()
        await eventually(lambda: bool(stack.fleet.reopened))
        stack.fleet.script.hold.set()
        events = await lines(response)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    (named,) = stack.fleet.reopened
    assert named.decode == stack.fleet.decode and named.token_age_s is not None
    assert len(stack.fleet.specs) == 1


async def test_streams_outlive_their_scheduler(stack):
    stack.fleet.script = Script(hold=asyncio.Event())
    async with stack.http.stream("POST", CHAT, json=STREAM) as response:
        await stack.begun()
        await stack.fleet.stop_scheduler()
        stack.fleet.script.hold.set()
        events = await lines(response)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_ready_follows_the_fleet(tmp_path):
    async with gateway(tmp_path, "proxy.submit_timeout_s=0.1") as stack:
        assert (await stack.http.get("/ready")).json() == {"status": "ready"}
        stack.fleet.announce(ready=False)
        await eventually(lambda: not stack.proxy.gateway.ready)
        response = await stack.http.get("/ready")
        assert (response.status_code, response.json()) == (503, {"status": "not ready"})


def progress(spec, state: str, computed_tokens: int, left_s: float | None) -> Progress:
    prompt = PromptProgress(
        state=RequestState(state), computed_tokens=computed_tokens, left_s=left_s
    )
    return Progress(request_id=spec.request_id, prompt=prompt)


async def test_silent_streams_get_comments(talkative):
    talkative.fleet.script = Script(hold=asyncio.Event(), hold_after=0)

    def queue(spec):
        talkative.fleet.progress[spec.request_id] = progress(spec, "queued", 0, None)
        talkative.fleet.place(spec)
        talkative.fleet.play_later(spec)

    talkative.fleet.script.on_submit = queue
    async with talkative.http.stream("POST", CHAT, json=STREAM) as response:
        found = event_lines(response)
        [spec] = talkative.fleet.specs
        total = spec.prompt_tokens
        assert await anext(found) == f": queued, 0 of {total} tokens"
        for state, computed, left_s, said in (
            ("prefilling", 3, 63.4, f": prefilling, 3 of {total} tokens, about 63 s left"),
            (
                "transferring",
                total,
                0.0,
                f": transferring, {total} of {total} tokens, about 0 s left",
            ),
        ):
            talkative.fleet.progress[spec.request_id] = progress(spec, state, computed, left_s)
            lines = (line async for line in found if line)
            while (line := await anext(lines)) != said:  # those sent before the news
                assert line.startswith(": ")
        talkative.fleet.script.hold.set()
        rest = [line async for line in found]
    assert rest[-2:] == ["data: [DONE]", ""]


async def test_several_prompts_are_said_as_one_and_silence_of_the_scheduler_is_borne(
    talkative, monkeypatch
):
    monkeypatch.setattr("millrace.proxy.fleet.prompts_ahead.ANSWER_S", 0.05)
    talkative.fleet.script = Script(hold=asyncio.Event(), hold_after=0)
    body = {"model": MODEL, "prompt": ["one two", "three"], "stream": True}
    async with talkative.http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line async for line in event_lines(response) if line)
        first, second = talkative.fleet.specs
        total = first.prompt_tokens + second.prompt_tokens
        assert await anext(lines) == f": queued, 0 of {total} tokens"  # no answer came
        for spec, state, left_s in ((first, "transferring", 1.0), (second, "prefilling", 9.0)):
            talkative.fleet.progress[spec.request_id] = progress(spec, state, 2, left_s)
        said = f": prefilling, 4 of {total} tokens, about 9 s left"
        while (line := await anext(lines)) != said:
            assert line.startswith(": queued")
        talkative.fleet.script.hold.set()
        assert [line async for line in lines][-1] == "data: [DONE]"


async def test_progress_events_come_if_asked_for(talkative):
    stack = talkative
    stack.fleet.script = Script(hold=asyncio.Event(), hold_after=0)

    def queue(spec):
        prompt = PromptProgress(
            state=RequestState.QUEUED, computed_tokens=2, left_s=60.0, queue_place=3
        )
        stack.fleet.progress[spec.request_id] = Progress(request_id=spec.request_id, prompt=prompt)
        stack.fleet.place(spec)
        stack.fleet.play_later(spec)

    stack.fleet.script.on_submit = queue
    body = {**STREAM, "stream_options": {"include_progress": True}}
    async with stack.http.stream("POST", CHAT, json=body) as response:
        found = (line async for line in event_lines(response) if line)
        assert await anext(found) == "event: millrace.progress"
        event = orjson.loads((await anext(found)).removeprefix("data: "))
        [spec] = stack.fleet.specs
        assert 60.0 <= event.pop("predicted_ttft_s") <= 60.0 + HANG_S
        assert event == {
            "id": spec.request_id,
            "state": "queued",
            "prompt_tokens": spec.prompt_tokens,
            "computed_tokens": 2,
            "queue_place": 3,
            "left_s": 60.0,
        }
        stack.fleet.script.hold.set()
        rest = [line async for line in found]
    assert rest[-1] == "data: [DONE]"
    answer = [orjson.loads(line[6:]) for line in rest if line.startswith('data: {"id":"chat')]
    chunks = [chunk for chunk in answer if "choices" in chunk]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello there"


async def test_metrics(stack):
    await stack.http.post(CHAT, json=BODY, headers=OBJECTIVES)
    await stack.http.post(CHAT, json={**BODY, "temperature": 9})
    text = (await stack.http.get("/metrics")).text
    for line in (
        'millrace_proxy_http_requests_total{code="200",route="/v1/chat/completions"} 1.0',
        'millrace_proxy_http_requests_total{code="400",route="/v1/chat/completions"} 1.0',
        'slo_requests_total{met="true",model="tiny",objective="ttft",slo_class="default"} 1.0',
        'slo_requests_total{met="true",model="tiny",objective="e2e",slo_class="default"} 1.0',
        'millrace_proxy_ttft_seconds_count{model="tiny",slo_class="default"} 1.0',
        'millrace_proxy_generated_tokens_total{model="tiny"} 8.0',
        'millrace_proxy_tbt_seconds_count{model="tiny"} 7.0',
        'millrace_proxy_inflight_requests{model="tiny"} 0.0',
    ):
        assert line in text


async def test_the_prompt_of_an_answered_request_is_freed_at_once(stack):
    """Not when the collector runs: that is seldom, and a prompt may have a million tokens."""
    hold = stack.fleet.script.hold = asyncio.Event()
    body = {"model": MODEL, "prompt": "hi there " * 50}
    gc.disable()
    try:
        asking = asyncio.create_task(stack.http.post("/v1/completions", json=body))
        await eventually(lambda: list(stack.proxy.gateway.requests))
        (request,) = stack.proxy.gateway.requests
        prompt = weakref.ref(request.prompt_ids)
        assert prompt().size > 50
        hold.set()
        assert (await asking).status_code == 200
        await eventually(lambda: prompt() is None)
    finally:
        gc.enable()
