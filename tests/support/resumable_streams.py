"""Resumable streams of scripted gateways: how tests start, cut, resume and read them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import orjson
from redis.asyncio import Redis

from millrace.core.config import StoreConfig
from millrace.event_lines import event_lines
from millrace.state.redis.streams import RedisStreams
from millrace.state.store import JournalEntry
from support.gateway import MODEL, token_event
from support.live_stack import eventually

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
            finish = said.finish if last else ""
            event = token_event(spec, 0, position, token_id, said, finish=finish, stops=stops)
            if self.journalled is None or position < self.journalled:
                entry = JournalEntry(
                    request_id=spec.request_id, choice=0, start=position, token_ids=[token_id]
                )
                await self.store.append_tokens([entry])
            self.fleet.emit(spec.proxy.id, [event])
            await asyncio.sleep(0)


def spied(monkeypatch, store, name):
    """Returns the list of what a method of a kind of StreamStore returns from now on."""
    original, found = getattr(store, name), []

    async def call(*arguments):
        found.append(await original(*arguments))
        return found[-1]

    monkeypatch.setattr(store, name, call)
    return found


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


async def has_tokens(stack, count):
    """Returns when the proxy has so many tokens of a request."""
    await eventually(
        lambda: any(one.completion_tokens == count for one in stack.proxy.gateway.requests)
    )


def bars_of(document):
    return {bar["name"]: bar for bar in document["spans"]}


async def trace_at(stack, stream_id):
    """Returns the waterfall at a replica, as soon as the replica has it."""
    found = []

    async def has_it():
        found.append(await stack.http.get(f"/v1/requests/{stream_id}/trace"))
        return found[-1].status_code == 200

    await eventually(has_it)
    return found[-1].json()


async def lose(store_url):
    """Restarts Redis without its data, as far as its clients can tell."""
    async with Redis.from_url(store_url) as client:
        await client.flushdb()
