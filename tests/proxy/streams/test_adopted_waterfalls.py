"""What is known of an adopted stream: the waterfall and the explanation of both replicas."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from millrace.core.scheduler.explanation.explain import Explanation
from millrace.core.span import Span
from millrace.proxy.http.endpoints import requests
from millrace.proxy.streams import lives
from millrace.wire.clients.scheduler_client import UnknownRequest
from support.gateway import Script
from support.live_stack import eventually
from support.resumable_streams import (
    KINDS,
    REPLY,
    Decode,
    bars_of,
    cut,
    has_tokens,
    resumed,
    trace_at,
)


async def adopted_once(replicas, store_url, *, noted=True):
    """Lets the second replica adopt a stream that the first has lost after 8 tokens, and begin to
    answer; `noted`: the first one has noted what it knows. Returns the stream's id, what lets the
    answer end, and the task that reads it.
    """
    one, other = replicas
    bar = Span(name="chunk 0", instance_id="before", start_s=0.0, end_s=0.001)
    Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=8, spans=[bar]))
    stream_id, found = await cut(one, *KINDS[0], 3)
    key = f"millrace:begun_waterfall:{stream_id}"
    async with Redis.from_url(store_url) as client:

        async def is_noted():
            return await client.exists(key)

        await eventually(is_noted)
        if not noted:
            await client.delete(key)
        await one.proxy.store.finish({stream_id: "cancelled"})  # by the scheduler
    hold = asyncio.Event()
    bar = Span(name="chunk 1", instance_id="after", start_s=60.0, end_s=61.0)
    Decode(other, Script(reply=REPLY, hold=hold, hold_after=12, spans=[bar]))
    coming = asyncio.create_task(resumed(other, stream_id, found[-1][0]))
    await has_tokens(other, 12)
    return stream_id, hold, coming


@pytest.fixture
def leases_that_lapse(monkeypatch):
    """Every stream is lost at once, and its owner soon hears of it."""
    monkeypatch.setattr(lives, "LEASE_S", 0.0)
    monkeypatch.setattr(lives, "RENEW_S", 0.02)


async def test_an_adopted_stream_has_the_waterfall_of_both_replicas(
    replicas, store_url, leases_that_lapse
):
    one, other = replicas
    stream_id, hold, coming = await adopted_once(replicas, store_url)
    found = await trace_at(other, stream_id)
    bars = bars_of(found)
    assert bars["chunk 0"]["instance_id"] == "before" and bars["chunk 1"]["instance_id"] == "after"
    mark, answers = bars["adopted"], [b for b in found["spans"] if b["name"] == "answer"]
    former = bars["tokenise"]["instance_id"]
    assert former.startswith("proxy-") and former != mark["instance_id"]
    assert mark["attributes"] == {"tokens": "8", "former": former}
    assert [bar["instance_id"] for bar in answers] == [former, mark["instance_id"]]
    assert answers[0]["end_s"] <= mark["start_s"] <= mark["end_s"] <= bars["moved"]["start_s"]
    assert found["ttft_ms"] == pytest.approx(answers[0]["start_s"] * 1e3, abs=1e-3)
    assert answers[1]["attributes"] == {"completion_tokens": "4"}
    assert [bar["name"] for bar in found["spans"]].count("tokenise") == 1
    await one.idle()  # it has heard that it has lost the stream
    refused = await one.http.get(f"/v1/requests/{stream_id}/trace")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_open")
    hold.set()
    await coming
    whole = await trace_at(other, stream_id)
    assert await trace_at(one, stream_id) == whole
    assert bars_of(whole)["adopted"] == mark and "error" not in whole
    assert bars_of(whole)["answer"]["end_s"] > answers[1]["end_s"]
    async with Redis.from_url(store_url) as client:

        async def is_forgotten():
            return not await client.exists(f"millrace:begun_waterfall:{stream_id}")

        await eventually(is_forgotten)


async def test_the_waterfall_of_an_adopted_stream_says_what_is_unknown(
    replicas, store_url, leases_that_lapse
):
    """Its first replica has died before it could write anything."""
    other = replicas[1]
    stream_id, hold, coming = await adopted_once(replicas, store_url, noted=False)
    found = await trace_at(other, stream_id)
    mark = bars_of(found)["adopted"]
    assert mark["attributes"] == {"tokens": "8", "former": "unknown"}
    assert mark["start_s"] == 0.0 < mark["end_s"]
    assert "ttft_ms" not in found and "tokenise" not in bars_of(found)
    hold.set()
    await coming


async def test_an_adopted_stream_is_explained_by_both_incarnations(
    replicas, store_url, leases_that_lapse, monkeypatch
):
    stream_id, hold, coming = await adopted_once(replicas, store_url)
    known = {stream_id: "cancelled", f"{stream_id}.2.1": "decoding"}

    async def explain(address, name):
        if name not in known:
            raise UnknownRequest(name)
        return Explanation(request_id=name, state=known[name], slo_class="", policy="fcfs")

    monkeypatch.setattr(requests, "explain", explain)
    await replicas[0].idle()
    for stack in replicas:
        found = (await stack.http.get(f"/v1/requests/{stream_id}/explain")).json()
        assert (found["request_id"], found["state"]) == (f"{stream_id}.2.1", "decoding")
        assert found["earlier"]["state"] == "cancelled" and "before" not in found["earlier"]
    del known[f"{stream_id}.2.1"]
    found = (await other_explained(replicas, stream_id)).json()
    assert found["state"] == "cancelled" and "earlier" not in found
    known.clear()
    assert (await other_explained(replicas, stream_id)).status_code == 404
    hold.set()
    await coming


async def other_explained(replicas, stream_id):
    return await replicas[1].http.get(f"/v1/requests/{stream_id}/explain")
