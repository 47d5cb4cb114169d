"""Resumable streams: on one replica and on two with the same Redis, from every event on."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from hashlib import sha256

import orjson
import pytest
from redis.asyncio import Redis

from millrace.concurrency import cancel
from millrace.core.config import StoreConfig, TenantConfig, load_config
from millrace.core.scheduler.explanation.explain import Explanation
from millrace.core.span import Span
from millrace.event_lines import event_lines
from millrace.proxy.http.endpoints import requests
from millrace.proxy.streams import lives, owned_stream, reader
from millrace.state.redis.streams import RedisStreams
from millrace.state.store import JournalEntry, StoreError
from millrace.state.streams import Hold, MemoryStreams
from millrace.wire.clients.scheduler_client import UnknownRequest
from support.deadlines import HANG_S
from support.gateway import MODEL, Script, gateway, token_event
from support.limits import KEY, two_limited, until_left
from support.live_stack import eventually
from support.stores import private_redis
from support.tool_model import THOUGHT, TWO, WEATHER, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ANTHROPIC = "/v1/messages"
REPLY = "Rivers turn wheels 😀 and naïve wheels turn stones. A race of water runs to the mill."
MESSAGES = [{"role": "user", "content": "hi"}]
RESUMABLE = {"x-millrace-resumable": "1"}
MESSAGE = (ANTHROPIC, {"messages": MESSAGES, "system": "Be brief.", "stop_sequences": ["to the"]})
USAGE = {"include_usage": True, "continuous_usage_stats": True}
#: Path and fields of streams whose events depend on the tokens in different ways.
KINDS = [
    (CHAT, {"messages": MESSAGES}),
    (CHAT, {"messages": MESSAGES, "stream_options": USAGE, "return_token_ids": True}),
    (CHAT, {"messages": MESSAGES, "stop": ["to the", " water r!"]}),
    (COMPLETIONS, {"prompt": "hi", "stream_options": USAGE, "stop": ["of water"]}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 9, "return_token_ids": True}),
]


class Decode:
    """Plays a stack's script and journals every token, but those from `journalled` on."""

    def __init__(self, stack, script):
        self.fleet, self.store, self.script = stack.fleet, stack.proxy.store, script
        self.journalled = None
        self.at_hold = asyncio.Event()  # all events and journal entries before the hold are out
        self.tasks = []
        stack.fleet.script = replace(script, on_submit=self.submitted)

    def submitted(self, spec):
        self.fleet.place(spec)
        self.tasks.append(asyncio.create_task(self.play(spec)))

    async def play(self, spec):
        script = self.script
        ids = script.token_ids or [
            *self.fleet.tokenizer.encode(script.reply, add_special_tokens=False).ids,
            1,
        ]
        first = spec.resumed_tokens
        ids = ids[: first + spec.sampling.max_tokens]
        for position, token_id in list(enumerate(ids))[first:]:
            if script.hold is not None and position == script.hold_after:
                self.at_hold.set()
                await script.hold.wait()
            last, stops = position == len(ids) - 1, token_id == 1
            said = replace(script, finish="stop" if stops else "length")
            event = token_event(spec, 0, position, token_id, said, last=last, stops=stops)
            if self.journalled is None or position < self.journalled:
                entry = JournalEntry(
                    request_id=spec.request_id, choice=0, start=position, token_ids=[token_id]
                )
                await self.store.append_tokens([entry])
            self.fleet.emit(spec.proxy.id, [event])
            await asyncio.sleep(0)


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def store_url():
    async with private_redis() as url:
        yield url


@pytest.fixture
async def replicas(tmp_path, store_url):
    """Two proxies with the same Redis, each with a scripted fleet of its own."""
    async with AsyncExitStack() as exits:
        yield [
            await exits.enter_async_context(gateway(tmp_path / name, f"store.url={store_url}"))
            for name in ("a", "b")
        ]


def spied(monkeypatch, store, name):
    """Returns the list of what a method of a kind of StreamStore returns from now on."""
    original, found = getattr(store, name), []

    async def call(*arguments):
        found.append(await original(*arguments))
        return found[-1]

    monkeypatch.setattr(store, name, call)
    return found


@pytest.fixture
def short_leases(monkeypatch):
    """Owners never renew: their streams are lost at once."""
    monkeypatch.setattr(lives, "LEASE_S", 0.0)
    monkeypatch.setattr(lives, "RENEW_S", HANG_S)


def body_of(fields):
    return {"model": MODEL, "stream": True, "max_tokens": 64, "temperature": 0, **fields}


def events_of(text):
    """Returns (id, the event without its id) of every numbered event."""
    found = []
    for event in text.split("\n\n"):
        if event.startswith("id: "):
            head, _, rest = event.partition("\n")
            found.append((head[4:], rest))
    return found


async def whole(stack, path, fields, **headers):
    """Returns the id of a stream and its events, undisturbed."""
    response = await stack.http.post(path, json=body_of(fields), headers={**RESUMABLE, **headers})
    assert response.status_code == 200, response.text
    return response.headers["x-request-id"], events_of(response.text)


async def resumed(stack, stream_id, after=None):
    """Returns the events after an event."""
    headers = {} if after is None else {"last-event-id": after}
    response = await stack.http.get(f"/v1/requests/{stream_id}/stream", headers=headers)
    assert response.status_code == 200, response.text
    return response.text


async def first_event(lines):
    """Reads the lines of a stream up to the first event's id."""
    while not (await anext(lines)).startswith("id: "):
        pass


async def cut(stack, path, fields, events):
    """Starts a stream and leaves it after a number of events; returns its id and the events."""
    found = []
    async with stack.http.stream("POST", path, json=body_of(fields), headers=RESUMABLE) as response:
        lines = event_lines(response)
        while len(found) < events:
            if (line := await anext(lines)).startswith("id: "):
                event = []
                while part := await anext(lines):
                    event.append(part)
                found.append((line[4:], "\n".join(event)))
        return response.headers["x-request-id"], found


@pytest.mark.parametrize(("path", "fields"), [*KINDS, MESSAGE])
async def test_an_ended_stream_continues_from_every_event(replicas, path, fields):
    Decode(replicas[0], Script(reply=REPLY))
    stream_id, events = await whole(replicas[0], path, fields)
    last = 'event: message_stop\ndata: {"type":"message_stop"}'
    assert len(events) > 4 and events[-1][1] == (last if path == ANTHROPIC else "data: [DONE]")
    assert [number.partition("-")[0] for number, _ in events] == [
        str(i + 1) for i in range(len(events))
    ]
    for stack in replicas:
        assert events_of(await resumed(stack, stream_id)) == events
        for i, (number, _) in enumerate(events):
            assert events_of(await resumed(stack, stream_id, number)) == events[i + 1 :]


@pytest.mark.parametrize("reply", [TWO, THOUGHT])
async def test_parsed_answers_continue_with_the_same_calls(tmp_path, reply):
    async with private_redis() as url, serving(tmp_path, f"store.url={url}") as stack:
        Decode(stack, Script(reply=reply))
        tool = {"name": "weather", "input_schema": WEATHER["parameters"]}
        for path, tools in (
            (CHAT, [{"type": "function", "function": WEATHER}]),
            (ANTHROPIC, [tool]),
        ):
            stream_id, events = await whole(stack, path, {"messages": MESSAGES, "tools": tools})
            for i, (number, _) in enumerate(events):
                assert events_of(await resumed(stack, stream_id, number)) == events[i + 1 :]


@pytest.mark.parametrize("at", [0, 1])
async def test_a_client_that_left_comes_back_while_the_stream_goes_on(replicas, at):
    """At its owner and at another replica, which reads the journal."""
    hold = asyncio.Event()
    Decode(replicas[0], Script(reply=REPLY, hold=hold, hold_after=6))
    path, fields = KINDS[1]
    stream_id, found = await cut(replicas[0], path, fields, 3)
    coming = asyncio.create_task(resumed(replicas[at], stream_id, found[-1][0]))
    await eventually(lambda: "resumed" in metric(replicas[at]))
    assert not replicas[0].fleet.cancels
    hold.set()
    rest = events_of(await coming)
    assert not replicas[0].fleet.cancels and not replicas[1].fleet.specs
    hold.set()
    _, undisturbed = await whole(replicas[0], path, fields)
    assert contents(found + rest) == contents(undisturbed)
    assert [int(n.partition("-")[0]) for n, _ in found + rest] == [
        i + 1 for i in range(len(undisturbed))
    ]


async def finished(store_url, stream_id):
    """Returns when the store has the end of the stream."""
    store = RedisStreams(StoreConfig(url=store_url))

    async def is_final():
        return (await store.get(stream_id)).final

    await eventually(is_final)
    await store.close()


def contents(events):
    """Returns the events without what differs between two answers: ids and times."""
    found = []
    for _, event in events:
        data = event.partition("data: ")[2]
        if data.startswith("{"):
            chunk = orjson.loads(data)
            chunk.get("message", {}).pop("id", None)
            found.append({k: v for k, v in chunk.items() if k not in ("id", "created")})
        else:
            found.append(data)
    return found


def metric(stack):
    registry = stack.proxy.metrics.registry.render("")[0].decode()
    return {
        line.split('"')[1]: float(line.split()[-1])
        for line in registry.splitlines()
        if line.startswith("millrace_proxy_resumable_requests_total{")
    }


@pytest.mark.parametrize(("path", "fields"), [*KINDS[:4], MESSAGE])
@pytest.mark.parametrize(("sent", "journalled"), [(1, 0), (3, 8), (8, 3)])
async def test_another_replica_adopts_a_lost_stream(
    replicas, store_url, short_leases, monkeypatch, path, fields, sent, journalled
):
    """`sent` events had come; the journal has more tokens, or fewer, or none."""
    one, other = replicas
    Decode(other, Script(reply=REPLY))
    _, undisturbed = await whole(other, path, fields)
    lost = Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=12))
    lost.journalled = journalled
    stream_id, found = await cut(one, path, fields, sent)
    await lost.at_hold.wait()
    await one.proxy.store.finish({stream_id: "cancelled"})  # by the scheduler: the replica is dead
    monkeypatch.setattr(lives, "RENEW_S", 0.02)  # for the other one
    rest = events_of(await resumed(other, stream_id, found[-1][0]))
    assert contents(found + rest) == contents(undisturbed)
    spec = other.fleet.specs[-1]
    assert (spec.request_id, spec.resumed_tokens) == (f"{stream_id}.2.1", journalled)
    assert spec.sampling.seed == one.fleet.specs[-1].sampling.seed
    assert metric(other)["adopted"] == 1.0
    # The whole stream can be read again at both, from the journal of its last incarnation: the one
    # that has lost it does not know that yet, and holds its own tokens.
    await finished(store_url, stream_id)
    for stack in replicas:
        again = await resumed(stack, stream_id)
        assert events_of(again) == found + rest, again
    lost.script.hold.set()


@pytest.mark.parametrize("ended", ["cancelled", "finished"])
async def test_a_replica_whose_request_has_ended_has_died_before_its_lease_lapses(
    replicas, monkeypatch, ended
):
    """The scheduler cancels the requests of a proxy whose connection ends. Decode may have finished
    one before. No event of the stream has reached its client.
    """
    monkeypatch.setattr(lives, "RENEW_S", HANG_S)
    monkeypatch.setattr(lives, "LEASE_S", 10 * HANG_S)
    monkeypatch.setattr(lives, "QUIET_S", 0.0)
    one, other = replicas
    path, fields = KINDS[0]
    hold = asyncio.Event()
    Decode(one, Script(reply=REPLY, hold=hold, hold_after=0))
    leaving = asyncio.create_task(one.http.post(path, json=body_of(fields), headers=RESUMABLE))
    await one.fleet.submitted.wait()
    stream_id = one.fleet.specs[0].request_id
    await cancel(leaving)
    Decode(other, Script(reply=REPLY))
    looks = spied(monkeypatch, RedisStreams, "get")
    coming = asyncio.create_task(resumed(other, stream_id))
    await eventually(lambda: len(looks) > 4)
    assert not metric(other).get("adopted")  # its request is alive
    await one.proxy.store.finish({stream_id: ended})
    if ended == "finished":
        seen = len(looks)
        await eventually(lambda: len(looks) > seen + 2)
        assert not metric(other).get("adopted")  # the journal lacks the tokens
        ids = [*one.fleet.tokenizer.encode(REPLY, add_special_tokens=False).ids, 1]
        entry = JournalEntry(request_id=stream_id, choice=0, start=0, token_ids=ids)
        await one.proxy.store.append_tokens([entry])
    found = events_of(await coming)
    assert metric(other)["adopted"] == 1.0
    assert len(other.fleet.specs) == (ended == "cancelled")  # computed again, or not
    assert contents(found) == contents((await whole(other, path, fields))[1])
    hold.set()


@pytest.mark.parametrize("ended", ["finished", "failed"])
async def test_the_tokens_that_a_finished_request_has_not_journalled_come_again(
    replicas, short_leases, monkeypatch, ended
):
    """Its replica and its decode instance have died. A request that has failed does not go on."""
    one, other = replicas
    lost = Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=12))
    lost.journalled = 4
    stream_id, found = await cut(one, *KINDS[0], 3)
    await lost.at_hold.wait()
    await one.proxy.store.finish({stream_id: ended})
    monkeypatch.setattr(lives, "RENEW_S", 0.02)  # for the other one
    Decode(other, Script(reply=REPLY))
    text = await resumed(other, stream_id, found[-1][0])
    if ended == "failed":
        assert "The stream's request is lost." in text and not other.fleet.specs
    else:
        assert other.fleet.specs[-1].resumed_tokens == 4
        assert contents(found + events_of(text)) == contents((await whole(other, *KINDS[0]))[1])
    lost.script.hold.set()


async def test_an_ended_stream_has_the_tokens_that_its_instance_died_with(replicas):
    one, other = replicas
    Decode(one, Script(reply=REPLY)).journalled = 3
    stream_id, events = await whole(one, *KINDS[0])
    assert events_of(await resumed(other, stream_id)) == events


async def test_who_waits_for_a_stream_that_is_refused_may_send_the_request_again(stack):
    stack.fleet.script = Script(on_submit=lambda spec: None)
    named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
    posting = asyncio.create_task(stack.http.post(CHAT, json=body, headers=named))
    await stack.fleet.submitted.wait()
    waiting = asyncio.create_task(resumed(stack, "mine"))
    await eventually(lambda: "resumed" in metric(stack))
    stack.fleet.refuse(stack.fleet.specs[0], "overloaded", "no room", retry_after_s=7)
    assert (await posting).status_code == 429
    assert '"code":"unavailable"' in await waiting
    Decode(stack, Script(reply=REPLY))
    assert (await stack.http.post(CHAT, json=body, headers=named)).status_code == 200


async def test_the_replica_that_adopts_a_stream_settles_its_limits(
    tmp_path, store_url, monkeypatch
):
    monkeypatch.setattr(lives, "LEASE_S", 0.0)
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    async with two_limited(tmp_path, store_url, tokens_per_day=1000, concurrency=1) as replicas:
        one, other = replicas
        for stack in replicas:
            stack.http.headers.update(KEY)
        path, fields = COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 64}
        lost = Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=12))
        stream_id, found = await cut(one, path, fields, 3)
        await until_left(other, "tokens", 1000 - 3 - 64)
        await one.proxy.store.finish({stream_id: "cancelled"})  # by the scheduler
        hold = asyncio.Event()
        decode = Decode(other, Script(reply=REPLY, hold=hold, hold_after=14))
        coming = asyncio.create_task(resumed(other, stream_id, found[-1][0]))
        await eventually(lambda: metric(other).get("adopted") == 1.0)
        refused = await other.http.post(path, json=body_of(fields))
        assert "concurrency: limit 1" in refused.json()["error"]["message"]
        lost.script.hold.set()
        await one.idle()  # it has learned that the stream is another's
        await until_left(other, "tokens", 1000 - 3 - 64)
        hold.set()
        assert events_of(await coming)[-1][1] == "data: [DONE]"
        tokens = len(decode.fleet.tokenizer.encode(REPLY, add_special_tokens=False).ids) + 1
        await until_left(one, "tokens", 1000 - 3 - tokens)
        assert (await other.http.post(path, json=body_of(fields))).status_code == 200


async def test_an_answer_that_ends_with_its_adoption_is_read_whole(
    replicas, short_leases, monkeypatch
):
    """The journal has all of it: its end is written while the reader notes the first token."""
    one, other = replicas
    path, fields = KINDS[0]
    Decode(other, Script(reply=REPLY))
    known_id, undisturbed = await whole(other, path, fields)
    lost = Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=0))
    posting = asyncio.create_task(one.http.post(path, json=body_of(fields), headers=RESUMABLE))
    await one.placed()
    stream_id, ids = one.fleet.specs[-1].request_id, await other.proxy.store.journal(known_id, 0)
    entry = JournalEntry(request_id=stream_id, choice=0, start=0, token_ids=ids.tolist())
    await one.proxy.store.append_tokens([entry])
    finish, get = RedisStreams.finish, RedisStreams.get
    finishing, read = asyncio.Event(), asyncio.Event()

    async def finish_slowly(*arguments):
        finishing.set()
        found = await finish(*arguments)
        await read.wait()
        return found

    async def get_noted(*arguments):
        found = await get(*arguments)
        if finishing.is_set():
            read.set()
        return found

    monkeypatch.setattr(RedisStreams, "finish", finish_slowly)
    monkeypatch.setattr(RedisStreams, "get", get_noted)
    text = await resumed(other, stream_id)
    lost.script.hold.set()
    assert contents(events_of(text)) == contents(undisturbed), text
    assert not other.fleet.specs[1:]
    assert (await posting).status_code == 409  # another replica continues it


async def test_an_adopted_stream_can_be_adopted_again(replicas, short_leases):
    one, other = replicas
    path, fields = KINDS[1]
    holds = [asyncio.Event(), asyncio.Event()]
    Decode(one, Script(reply=REPLY, hold=holds[0], hold_after=5)).journalled = 4
    stream_id, found = await cut(one, path, fields, 3)
    Decode(other, Script(reply=REPLY, hold=holds[1], hold_after=9))
    async with other.http.stream(
        "GET", f"/v1/requests/{stream_id}/stream", headers={"last-event-id": found[-1][0]}
    ) as response:
        lines = event_lines(response)
        while len(found) < 7:
            if (line := await anext(lines)).startswith("id: "):
                found.append((line[4:], await anext(lines)))
    holds[0].set()
    await one.idle()  # it has abandoned the stream
    Decode(one, Script(reply=REPLY))
    rest = events_of(await resumed(one, stream_id, found[-1][0]))
    assert one.fleet.specs[-1].request_id == f"{stream_id}.3.1"
    holds[1].set()
    _, undisturbed = await whole(one, path, fields)
    assert contents(found + rest) == contents(undisturbed)


async def has_tokens(stack, count):
    """Returns when the proxy has so many tokens of a request."""
    await eventually(
        lambda: any(one.completion_tokens == count for one in stack.proxy.gateway.requests)
    )


def bars_of(document):
    return {bar["name"]: bar for bar in document["spans"]}


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


async def trace_at(stack, stream_id):
    """Returns the waterfall at a replica, as soon as the replica has it."""
    found = []

    async def has_it():
        found.append(await stack.http.get(f"/v1/requests/{stream_id}/trace"))
        return found[-1].status_code == 200

    await eventually(has_it)
    return found[-1].json()


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


async def test_a_replica_that_is_cut_off_ends_its_work(replicas, monkeypatch):
    """It learns of the adoption when it renews its lease: it sends no end and changes nothing."""
    one, other = replicas
    monkeypatch.setattr(lives, "RENEW_S", HANG_S)
    monkeypatch.setattr(lives, "LEASE_S", 0.0)
    hold = asyncio.Event()
    Decode(one, Script(reply=REPLY, hold=hold, hold_after=5))
    Decode(other, Script(reply=REPLY))
    path, fields = KINDS[0]
    async with one.http.stream("POST", path, json=body_of(fields), headers=RESUMABLE) as response:
        lines = event_lines(response)
        await first_event(lines)
        stream_id = response.headers["x-request-id"]
        events = events_of(await resumed(other, stream_id))
        assert events[-1][1] == "data: [DONE]"
        one.fleet.move(one.fleet.specs[0])  # it tells the store where it goes on
        rest = [line async for line in lines if line]
    assert orjson.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "continued_elsewhere"
    hold.set()
    assert events_of(await resumed(other, stream_id)) == events


async def test_a_migrated_stream_is_read_at_another_replica(replicas):
    one, other = replicas
    hold = asyncio.Event()
    decode = Decode(one, Script(reply=REPLY, hold=hold, hold_after=6))
    decode.journalled = 4  # its decode instance dies before it has journalled all
    path, fields = KINDS[1]
    stream_id, found = await cut(one, path, fields, 3)
    coming = asyncio.create_task(resumed(other, stream_id, found[-1][0]))
    await eventually(lambda: "resumed" in metric(other))
    await decode.at_hold.wait()
    decode.journalled, decode.script = None, Script(reply=REPLY)
    one.fleet.move(one.fleet.specs[0])
    rest = events_of(await coming)
    hold.set()
    _, undisturbed = await whole(one, path, fields)
    assert contents(found + rest) == contents(undisturbed)
    assert other.fleet.specs == []


async def test_another_answer_is_an_error_and_no_text(replicas, short_leases):
    """If the regenerated tokens differ from those that were sent, an error ends the stream."""
    one, other = replicas
    lost = Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=8))
    lost.journalled = 2
    stream_id, found = await cut(one, *KINDS[0], 7)
    Decode(other, Script(reply="Rivers run to the mill, and the mill grinds wheat, rye, barley."))
    text = await resumed(other, stream_id, found[-1][0])
    assert events_of(text) == []
    assert orjson.loads(text.strip().removeprefix("data: "))["error"]["code"] == "diverged"
    lost.script.hold.set()


async def test_errors_of_messages_have_their_form(stack):
    Decode(stack, Script(reply=REPLY))
    stream_id, events = await whole(stack, *MESSAGE)
    number, checksum = events[2][0].split("-")
    text = await resumed(stack, stream_id, f"{number}-{int(checksum, 16) ^ 1:08x}")
    kind, data = text.strip().split("\n")
    assert (kind, events_of(text)) == ("event: error", [])
    found = orjson.loads(data.removeprefix("data: "))
    assert found["type"] == "error" and "another one now" in found["error"]["message"]


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
async def test_an_id_of_another_stream_is_no_place_to_resume_from(stack, kind):
    Decode(stack, Script(reply=REPLY))
    stream_id, events = await whole(stack, *kind)
    for wrong in ("99-00000000", events[2][0][:-1] + "z", "x"):
        headers = {"last-event-id": wrong}
        response = await stack.http.get(f"/v1/requests/{stream_id}/stream", headers=headers)
        assert "error" in response.text and events_of(response.text) == []
    number = events[2][0].partition("-")[0]
    text = await resumed(stack, stream_id, f"{number}-{int(events[2][0][-8:], 16) ^ 1:08x}")
    assert events_of(text) == [] and '"diverged"' in text


async def test_without_a_client_a_stream_is_cancelled_after_the_grace_time(tmp_path, monkeypatch):
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    monkeypatch.setattr(reader, "LAST_TOKENS_S", 0.0)
    async with gateway(tmp_path, "proxy.resume_grace_s=0.1") as stack:
        Decode(stack, Script(reply=REPLY, hold=asyncio.Event(), hold_after=4))
        stream_id, found = await cut(stack, *KINDS[0], 2)
        await asyncio.wait_for(stack.fleet.cancelled.wait(), HANG_S)
        assert stack.fleet.cancels[0].reason == "expired"

        async def ended():
            return '"expired"' in await resumed(stack, stream_id, found[-1][0])

        await eventually(ended)
        assert metric(stack)["expired"] == 1.0


async def test_a_reader_keeps_a_stream_wanted(stack, monkeypatch):
    monkeypatch.setattr(reader, "CHECK_S", 0.02)
    wanted = spied(monkeypatch, MemoryStreams, "want")
    hold = asyncio.Event()
    Decode(stack, Script(reply=REPLY, hold=hold, hold_after=4))
    stream_id, found = await cut(stack, *KINDS[0], 2)
    assert not wanted
    coming = asyncio.create_task(resumed(stack, stream_id, found[-1][0]))
    await eventually(lambda: len(wanted) > 2)
    hold.set()
    assert events_of(await coming)[-1][1] == "data: [DONE]"


async def test_a_stream_that_the_store_has_lost_is_recorded_again(replicas, store_url, monkeypatch):
    """As after a restart of Redis without its data: the client has its stream, and no other may."""
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    renewals = spied(monkeypatch, RedisStreams, "renew")
    one, other = replicas
    hold = asyncio.Event()
    Decode(one, Script(reply=REPLY, hold=hold, hold_after=5))
    path, fields = KINDS[0]
    named = {**RESUMABLE, "x-millrace-request-id": "mine"}
    async with one.http.stream("POST", path, json=body_of(fields), headers=named) as response:
        lines = event_lines(response)
        await first_event(lines)
        await lose(store_url)
        await eventually(lambda: Hold.GONE in renewals and renewals[-1] is Hold.HELD)
        assert metric(one)["restored"] == 1.0
        again = await other.http.post(path, json=body_of(fields), headers=named)
        assert again.status_code == 409
        hold.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"
    assert renewals.count(Hold.GONE) == 1


async def lose(store_url):
    """Restarts Redis without its data, as far as its clients can tell."""
    async with Redis.from_url(store_url) as client:
        await client.flushdb()


@pytest.mark.parametrize("at", [0, 1])
async def test_a_client_that_was_away_has_a_stream_that_the_store_has_lost(
    replicas, store_url, monkeypatch, at
):
    """It comes back before the owner has noticed the loss."""
    monkeypatch.setattr(lives, "RENEW_S", 0.3)
    hold = asyncio.Event()
    decode = Decode(replicas[0], Script(reply=REPLY, hold=hold, hold_after=6))
    path, fields = KINDS[1]
    stream_id, found = await cut(replicas[0], path, fields, 3)
    await decode.at_hold.wait()
    await lose(store_url)
    coming = asyncio.create_task(resumed(replicas[at], stream_id, found[-1][0]))
    await eventually(lambda: metric(replicas[0]).get("restored") == 1.0)
    hold.set()
    rest = events_of(await coming)
    _, undisturbed = await whole(replicas[0], path, fields)
    assert contents(found + rest) == contents(undisturbed)
    assert not replicas[0].fleet.cancels and not replicas[1].fleet.specs


async def test_a_reader_elsewhere_reads_on_when_the_store_has_lost_the_stream(
    replicas, store_url, monkeypatch
):
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    monkeypatch.setattr(reader, "CHECK_S", 0.02)
    one, other = replicas
    hold = asyncio.Event()
    Decode(one, Script(reply=REPLY, hold=hold, hold_after=6))
    path, fields = KINDS[1]
    stream_id, found = await cut(one, path, fields, 1)
    url = f"/v1/requests/{stream_id}/stream"
    async with other.http.stream("GET", url, headers={"last-event-id": found[0][0]}) as response:
        lines = event_lines(response)
        read = [line async for line in until_event(lines, 4)]
        await lose(store_url)
        await eventually(lambda: metric(one).get("restored") == 1.0)
        hold.set()
        read += [line async for line in lines]
    rest = events_of("\n".join([*read, ""]))
    _, undisturbed = await whole(one, path, fields)
    assert contents(found + rest) == contents(undisturbed)


async def until_event(lines, number):
    """Yields the lines up to the end of the event with this number."""
    seen = False
    async for line in lines:
        yield line
        seen = seen or line.startswith(f"id: {number}-")
        if seen and not line:
            return


async def test_another_replica_adopts_a_stream_that_the_store_had_lost(
    replicas, store_url, monkeypatch
):
    """It finds the prompt and the tokens of before the loss, and generates the rest."""
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    one, other = replicas
    Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=6))
    Decode(other, Script(reply=REPLY))
    path, fields = KINDS[1]
    stream_id, found = await cut(one, path, fields, 3)
    await has_tokens(one, 6)
    await lose(store_url)
    await eventually(lambda: metric(one).get("restored") == 1.0)
    await one.proxy.stop()
    rest = events_of(await resumed(other, stream_id, found[-1][0]))
    assert metric(other)["adopted"] == 1.0 and other.fleet.specs[0].resumed_tokens == 6
    _, undisturbed = await whole(other, path, fields)
    assert contents(found + rest) == contents(undisturbed)


async def test_a_stream_whose_end_finds_the_store_without_it_can_be_read(
    replicas, store_url, monkeypatch
):
    """The stream is over before its next renewal."""

    async def keep(stream):
        pass

    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    monkeypatch.setattr(owned_stream.OwnedStream, "keep", keep)
    one, other = replicas
    hold = asyncio.Event()
    decode = Decode(one, Script(reply=REPLY, hold=hold, hold_after=6))
    path, fields = KINDS[1]
    stream_id, found = await cut(one, path, fields, 3)
    await decode.at_hold.wait()
    await lose(store_url)
    hold.set()
    await eventually(lambda: metric(one).get("restored") == 1.0)
    rest = events_of(await resumed(other, stream_id, found[-1][0]))
    await finished(store_url, stream_id)
    assert await other.state_of(stream_id) == "finished"
    _, undisturbed = await whole(one, path, fields)
    assert contents(found + rest) == contents(undisturbed)


async def test_of_two_streams_of_one_id_the_recorded_one_goes_on(replicas, store_url, monkeypatch):
    """The store lost the first one, and another replica took the id before the first renewed."""
    one, other = replicas
    hold = asyncio.Event()
    Decode(one, Script(reply=REPLY, hold=hold, hold_after=5))
    Decode(other, Script(reply=REPLY, hold=hold, hold_after=5))
    path, fields = KINDS[0]
    named = {**RESUMABLE, "x-millrace-request-id": "mine"}
    async with one.http.stream("POST", path, json=body_of(fields), headers=named) as first:
        lines = event_lines(first)
        await first_event(lines)
        await lose(store_url)
        posting = asyncio.create_task(other.http.post(path, json=body_of(fields), headers=named))
        await eventually(lambda: metric(other).get("started") == 1.0)
        rest = [line async for line in lines if line]
        assert "continued_elsewhere" in rest[-1] and metric(one)["fenced"] == 1.0
        hold.set()
    found = await posting
    assert found.status_code == 200 and events_of(found.text)[-1][1] == "data: [DONE]"


async def test_an_answer_whose_begin_can_not_be_written_goes_on(replicas, store_url, monkeypatch):
    """The store is away when the first token comes: its client gets 200 and all tokens."""
    one, other = replicas
    hold = asyncio.Event()
    decode = Decode(one, Script(reply=REPLY, hold=hold, hold_after=0))
    path, fields = KINDS[1]
    posting = asyncio.create_task(one.http.post(path, json=body_of(fields), headers=RESUMABLE))
    await decode.at_hold.wait()
    renew, refused = RedisStreams.renew, []

    async def away(*arguments):
        refused.append(arguments)
        raise StoreError("no server")

    monkeypatch.setattr(RedisStreams, "renew", away)
    hold.set()
    await eventually(lambda: refused)
    monkeypatch.setattr(RedisStreams, "renew", renew)
    found = await posting
    assert found.status_code == 200 and events_of(found.text)[-1][1] == "data: [DONE]"
    again = await resumed(other, found.headers["x-request-id"])
    assert events_of(again) == events_of(found.text)


async def test_an_id_is_not_taken_before_its_request_is_accepted(stack, monkeypatch):
    """It may still be refused: 409 would tell the client that its stream is there."""
    Decode(stack, Script(reply=REPLY))
    create, begun, go_on = MemoryStreams.create, asyncio.Event(), asyncio.Event()

    async def slow(*arguments, **fields):
        begun.set()
        await go_on.wait()
        return await create(*arguments, **fields)

    monkeypatch.setattr(MemoryStreams, "create", slow)
    named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
    posting = asyncio.create_task(stack.http.post(KINDS[0][0], json=body, headers=named))
    await begun.wait()
    assert (await stack.http.post(KINDS[0][0], json=body, headers=named)).status_code == 503
    go_on.set()
    assert (await posting).status_code == 200
    assert (await stack.http.post(KINDS[0][0], json=body, headers=named)).status_code == 409


async def test_a_stream_whose_id_is_asked_for_again_goes_on(stack):
    """Its client has lost the connection before the 200, and posts again at the same replica."""
    hold = asyncio.Event()
    decode = Decode(stack, Script(reply=REPLY, hold=hold, hold_after=0))
    named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
    posting = asyncio.create_task(stack.http.post(CHAT, json=body, headers=named))
    await decode.at_hold.wait()
    assert (await stack.http.post(CHAT, json=body, headers=named)).status_code == 409
    assert stack.proxy.models.inflight == 1
    hold.set()
    found = await posting
    assert found.status_code == 200 and events_of(found.text)[-1][1] == "data: [DONE]"


async def test_the_id_of_a_migrated_request_that_is_refused_is_free_again(tmp_path):
    """The store has two records of it: 409 for the first would name a stream that is not there."""

    def move(spec):
        stack.fleet.script = Script(on_submit=lambda moved: None)  # the scheduler is silent
        stack.fleet.fail(spec, "the store is away", prompt_unread=True)

    async with gateway(tmp_path, "proxy.submit_timeout_s=1") as stack:
        stack.fleet.script = Script(on_submit=move)
        named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
        refused = await stack.http.post(KINDS[0][0], json=body, headers=named)
        assert refused.status_code == 503 and len(stack.fleet.specs) == 2
        Decode(stack, Script(reply=REPLY))
        assert (await stack.http.post(KINDS[0][0], json=body, headers=named)).status_code == 200


async def test_the_id_of_a_start_that_broke_is_free_again(stack, monkeypatch):
    Decode(stack, Script(reply=REPLY))
    create = MemoryStreams.create

    async def broken(*arguments, **fields):
        await create(*arguments, **fields)
        raise RuntimeError("a defect")

    named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
    monkeypatch.setattr(MemoryStreams, "create", broken)
    assert (await stack.http.post(KINDS[0][0], json=body, headers=named)).status_code == 500
    monkeypatch.setattr(MemoryStreams, "create", create)
    assert (await stack.http.post(KINDS[0][0], json=body, headers=named)).status_code == 200


async def test_an_id_is_taken_while_its_stream_is_generated_though_the_store_has_lost_it(
    replicas, store_url
):
    """The request was migrated since, so that the gateway does not know the first id either."""
    one, _ = replicas
    hold = asyncio.Event()
    decode = Decode(one, Script(reply=REPLY, hold=hold, hold_after=0))
    named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
    posting = asyncio.create_task(one.http.post(CHAT, json=body, headers=named))
    await decode.at_hold.wait()
    await lose(store_url)
    one.fleet.move(one.fleet.specs[0])
    await eventually(lambda: len(one.fleet.specs) == 2)
    again = await one.http.post(CHAT, json=body, headers=named)
    assert again.status_code == 409 and len(one.fleet.specs) == 2
    hold.set()
    found = await posting
    assert found.status_code == 200 and events_of(found.text)[-1][1] == "data: [DONE]"
    assert (await one.http.post(CHAT, json=body, headers=named)).status_code == 409  # restored


async def test_a_proxy_that_stops_hands_its_streams_over(tmp_path):
    async with AsyncExitStack() as exits:
        url = await exits.enter_async_context(private_redis())
        settings = (f"store.url={url}", "proxy.drain_timeout_s=0")
        other = await exits.enter_async_context(gateway(tmp_path / "b", *settings))
        Decode(other, Script(reply=REPLY))
        path, fields = KINDS[0]
        async with gateway(tmp_path / "a", *settings) as one:
            Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=6))
            stream_id, found = await cut(one, path, fields, 3)
            await has_tokens(one, 6)
            await one.proxy.stop()
            rest = events_of(await resumed(other, stream_id, found[-1][0]))
            _, undisturbed = await whole(other, path, fields)
            assert contents(found + rest) == contents(undisturbed)
            await one.idle()
            whole_trace = await trace_at(other, stream_id)
            told = bars_of(whole_trace)["adopted"]["attributes"]
            [former, _] = [bar for bar in whole_trace["spans"] if bar["name"] == "answer"]
            assert told == {"tokens": "6", "former": former["instance_id"]}
            assert former["attributes"]["completion_tokens"] == "6"  # as of its last moment
            assert "error" not in whole_trace


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": False}, "stream"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_what_a_journal_lacks_is_refused_by_name(stack, fields, param):
    body = body_of({"messages": MESSAGES, **fields})
    response = await stack.http.post(CHAT, json=body, headers=RESUMABLE)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_other_refusals(stack, tmp_path):
    for fields, headers, param in (
        ({"prompt": ["a", "b"]}, RESUMABLE, "prompt"),
        ({"prompt": "a", "echo": True}, RESUMABLE, "echo"),
        ({"prompt": "a"}, {**RESUMABLE, "x-millrace-trace": "1"}, "x-millrace-trace"),
        ({"prompt": "a"}, {"x-millrace-resumable": "yes"}, "x-millrace-resumable"),
    ):
        response = await stack.http.post(COMPLETIONS, json=body_of(fields), headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    async with gateway(tmp_path / "off", "proxy.resume_grace_s=0") as off:
        response = await off.http.post(
            COMPLETIONS, json=body_of({"prompt": "a"}), headers=RESUMABLE
        )
        assert response.status_code == 400


async def test_the_id_of_a_refused_request_is_free_again(stack):
    stack.fleet.script = Script(
        on_submit=lambda spec: stack.fleet.refuse(spec, "overloaded", "no room", retry_after_s=7)
    )
    named = {"x-millrace-request-id": "mine"}
    body = body_of({"messages": MESSAGES})
    for headers in (named, {**named, **RESUMABLE}, named):
        response = await stack.http.post(CHAT, json=body, headers=headers)
        assert response.status_code == 429

        async def gone():
            found = [await stack.http.get(f"/v1/requests/mine{end}") for end in ("", "/stream")]
            return [one.status_code for one in found] == [404, 404]

        await eventually(gone)


async def test_streams_without_the_header_have_no_ids_and_cannot_be_resumed(stack):
    response = await stack.http.post(CHAT, json=body_of({"messages": MESSAGES}))
    assert "id: " not in response.text.replace('"id"', "")
    stream_id = response.headers["x-request-id"]
    response = await stack.http.get(f"/v1/requests/{stream_id}/stream")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "stream_not_found")


async def test_tenants_resume_their_own_streams_only(tmp_path):
    tenants = {
        name: TenantConfig(key_sha256=(sha256(name.encode()).hexdigest(),))
        for name in ("ann", "bob")
    }
    async with private_redis() as url:
        config = replace(load_config(), tenants=tenants, store=StoreConfig(url=url))
        async with gateway(tmp_path, config=config) as stack:
            Decode(stack, Script(reply=REPLY))
            ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
            stream_id, _ = await whole(stack, *KINDS[0], **ann)
            for who, status in ((ann, 200), (bob, 404)):
                path = f"/v1/requests/{stream_id}/stream"
                assert (await stack.http.get(path, headers=who)).status_code == status
