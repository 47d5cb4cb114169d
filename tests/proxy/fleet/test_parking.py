"""Requests wait in the proxy while there is no fleet, and are submitted in order after that."""

from __future__ import annotations

import asyncio

import pytest

from millrace.proxy.fleet.parking import LoadReport
from support.gateway import MODEL, Script, gateway
from support.live_stack import eventually

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def stack(tmp_path, monkeypatch):
    monkeypatch.setattr("millrace.proxy.fleet.parking.REPORT_INTERVAL_S", 0.05)
    settings = ("proxy.park_timeout_s=5", "proxy.max_parked=3", "proxy.submit_timeout_s=0.5")
    async with gateway(tmp_path, *settings) as running:
        yield running


def error(response):
    return response.json()["error"]


def answer(response):
    return response.json()["choices"][0]["message"]["content"]


async def asleep(stack):
    stack.fleet.announce(ready=False)
    await eventually(lambda: not stack.proxy.gateway.fleet_ready)


async def parked(stack, count=1, **body):
    """Returns this many waiting requests, in order."""
    asking = []
    for _ in range(count):
        asking.append(asyncio.create_task(stack.http.post(CHAT, json={**BODY, **body})))
        await eventually(lambda: stack.proxy.gateway.parked == len(asking))
    return asking


async def test_requests_wait_for_a_fleet_and_go_on_in_order(stack):
    await asleep(stack)
    asking = await parked(stack, 3)
    waiting = [r.request_id for r in stack.proxy.gateway.requests]
    assert not stack.fleet.specs
    await eventually(lambda: stack.fleet.parked_requests == 3)
    assert (
        'millrace_proxy_parked_requests{model="tiny"} 3.0'
        in (await stack.http.get("/metrics")).text
    )
    stack.fleet.announce(ready=True)
    assert [answer(response) for response in await asyncio.gather(*asking)] == ["Hello there"] * 3
    assert [spec.request_id for spec in stack.fleet.specs] == waiting
    await eventually(lambda: stack.fleet.parked_requests == 0)


async def test_a_stream_that_waits_is_traced(stack):
    await asleep(stack)
    asking = asyncio.create_task(
        stack.http.post(CHAT, json=BODY, headers={"x-millrace-trace": "1"})
    )
    await eventually(lambda: stack.proxy.gateway.parked == 1)
    stack.fleet.announce(ready=True)
    spans = {span["name"]: span for span in (await asking).json()["millrace"]["spans"]}
    assert spans["parked"]["instance_id"] == stack.proxy.gateway.incarnation.id
    assert spans["record"]["end_s"] <= spans["parked"]["start_s"]
    assert spans["parked"]["end_s"] <= spans["place"]["start_s"] + 1e-9


async def test_no_more_wait_than_allowed(stack):
    await asleep(stack)
    asking = await parked(stack, 3)
    response = await stack.http.post(CHAT, json=BODY)
    assert (response.status_code, error(response)["code"]) == (429, "overloaded")
    assert "retry-after" in response.headers
    assert "the limit is 3" in error(response)["message"]
    stack.fleet.announce(ready=True)
    await asyncio.gather(*asking)
    assert (await stack.http.post(CHAT, json=BODY)).status_code == 200


async def test_a_request_of_several_prompts_waits_as_one_or_not_at_all(stack):
    await asleep(stack)
    body = {"model": MODEL, "prompt": ["a"] * 4}
    assert (await stack.http.post("/v1/completions", json=body)).status_code == 429
    assert stack.proxy.gateway.parked == 0
    body["prompt"].pop()
    asking = asyncio.create_task(stack.http.post("/v1/completions", json=body))
    await eventually(lambda: stack.proxy.gateway.parked == 3)
    stack.fleet.announce(ready=True)
    assert len((await asking).json()["choices"]) == 3


async def test_the_wait_has_an_end(tmp_path):
    async with gateway(tmp_path, "proxy.park_timeout_s=0.1") as stack:
        await asleep(stack)
        response = await stack.http.post(CHAT, json=BODY)
        assert (response.status_code, error(response)["code"]) == (503, "unavailable")
        assert "retry-after" in response.headers
        assert stack.proxy.gateway.parked == 0
        assert not stack.fleet.specs


async def test_an_interruption_holds_requests_back_where_parking_is_off(tmp_path):
    async with gateway(tmp_path) as stack:
        await asleep(stack)
        assert stack.proxy.gateway.ready
        asking = asyncio.create_task(stack.http.post(CHAT, json=BODY))
        await eventually(lambda: stack.proxy.gateway.parked == 1)
        stack.fleet.announce(ready=True)
        assert answer(await asking) == "Hello there"


async def test_an_interruption_has_an_end(tmp_path):
    async with gateway(tmp_path, "proxy.submit_timeout_s=0.1") as stack:
        stack.fleet.script = Script(
            on_submit=lambda spec: stack.fleet.refuse(spec, "unavailable", "no instance", 5)
        )
        await asleep(stack)
        response = await stack.http.post(CHAT, json=BODY)
        assert (response.status_code, error(response)["code"]) == (503, "unavailable")
        await eventually(lambda: not stack.proxy.gateway.ready)
        response = await stack.http.post(CHAT, json=BODY)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert stack.proxy.gateway.parked == 0


async def test_a_client_that_leaves_is_forgotten(stack):
    await asleep(stack)
    [asking] = await parked(stack)
    [request] = stack.proxy.gateway.requests
    asking.cancel()
    await eventually(lambda: stack.proxy.gateway.parked == 0)
    await stack.idle()
    stack.fleet.announce(ready=True)
    await eventually(lambda: stack.proxy.gateway.fleet_ready)
    assert (await stack.http.post(CHAT, json=BODY)).status_code == 200
    assert len(stack.fleet.specs) == 1
    assert await stack.proxy.store.get(request.request_id) is None


async def test_a_refusal_for_want_of_instances_is_no_end(stack):
    def refuse(spec):
        stack.fleet.announce(ready=False)
        stack.fleet.refuse(spec, "unavailable", "no decode instance takes new work")

    stack.fleet.script = Script(on_submit=refuse)
    asking = asyncio.create_task(stack.http.post(CHAT, json=BODY))
    await eventually(lambda: stack.proxy.gateway.parked == 1)
    stack.fleet.script = Script()
    stack.fleet.announce(ready=True)
    assert answer(await asking) == "Hello there"
    first, second = stack.fleet.specs
    assert first == second


async def test_refusals_of_another_kind_end_it(stack):
    stack.fleet.script = Script(
        on_submit=lambda spec: stack.fleet.refuse(spec, "overloaded", "no room", 7)
    )
    response = await stack.http.post(CHAT, json=BODY)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")


async def test_a_proxy_that_shuts_down_sends_them_away(stack):
    await asleep(stack)
    asking = await parked(stack, 2)
    stack.proxy.gateway.drain()
    for response in await asyncio.gather(*asking):
        assert (response.status_code, error(response)["code"]) == (503, "unavailable")
    assert (await stack.http.get("/ready")).status_code == 503
    assert (await stack.http.post(CHAT, json=BODY)).status_code == 503


async def test_a_proxy_is_ready_while_it_can_wake_a_fleet(stack):
    await asleep(stack)
    assert (await stack.http.get("/ready")).status_code == 200
    await stack.fleet.stop_scheduler()
    await eventually(lambda: not stack.proxy.gateway.ready)
    assert (await stack.http.get("/ready")).status_code == 503
    assert (await stack.http.post(CHAT, json=BODY)).status_code == 503
    await stack.fleet.start_scheduler()
    await eventually(lambda: stack.proxy.gateway.ready)


async def test_what_waits_outlives_its_scheduler_which_is_told_again(stack):
    await asleep(stack)
    [asking] = await parked(stack)
    await eventually(lambda: stack.fleet.parked_requests == 1)
    await stack.fleet.stop_scheduler()
    await eventually(lambda: not stack.proxy.gateway.ready)
    stack.fleet.parked_requests = 0
    await stack.fleet.start_scheduler()
    await eventually(lambda: stack.fleet.parked_requests == 1)
    stack.fleet.announce(ready=True)
    assert answer(await asking) == "Hello there"


async def test_load_is_told_once_a_while_and_ends_right(monkeypatch):
    monkeypatch.setattr("millrace.proxy.fleet.parking.REPORT_INTERVAL_S", 0.05)
    told = []
    report = LoadReport(told.append)
    report.repeat()
    assert told == []
    for parked_now in (1, 2, 3):
        report.set(parked_now)
    assert told == [1]
    await eventually(lambda: told == [1, 3])
    report.repeat()
    await eventually(lambda: told == [1, 3, 3])
    report.set(0)
    report.close()
    await asyncio.sleep(0.1)
    assert told == [1, 3, 3]
