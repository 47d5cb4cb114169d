"""Answers of a scripted gateway whose decode instance goes away meanwhile."""

from __future__ import annotations

import asyncio

import orjson

from millrace.event_lines import event_lines
from support.deadlines import HANG_S
from support.gateway import MODEL, Script
from support.live_stack import eventually

COMPLETIONS = "/v1/completions"
TEXT = "Hello there, grüße"
BODY = {"model": MODEL, "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
TRACED = {"x-millrace-trace": "1"}


class Answer:
    """A streamed answer that the client received."""

    def __init__(self, chunks):
        self.chunks = chunks
        self.ids = {chunk["id"] for chunk in chunks if "id" in chunk}
        self.choices = [c for chunk in chunks for c in chunk.get("choices", ())]
        self.text = "".join(choice["text"] for choice in self.choices)
        self.usage = chunks[-1].get("usage")
        self.trace = chunks[-1].get("millrace", {})
        self.error = chunks[-1].get("error")

    @property
    def finish_reason(self):
        return self.choices[-1]["finish_reason"]

    @property
    def token_ids(self):
        return [i for choice in self.choices for i in choice.get("token_ids", ())]

    @property
    def logprobs(self):
        return [x for c in self.choices if c.get("logprobs") for x in c["logprobs"]["tokens"]]


async def ask(stack, body, headers=None):
    async with stack.http.stream("POST", COMPLETIONS, json=body, headers=headers) as response:
        assert response.status_code == 200
        lines = [line async for line in event_lines(response)]
    return Answer([orjson.loads(line[6:]) for line in lines if line[:7] == "data: {"])


async def undisturbed(stack, body):
    stack.fleet.script = Script(reply=TEXT)
    return await ask(stack, body)


async def disturbed(stack, body, disturb, after=5, headers=None, reply=TEXT):
    """Returns the answer if `disturb(spec)` runs after `after` tokens per choice."""
    held = Script(reply=reply, hold=asyncio.Event(), hold_after=after)
    many = after * body.get("n", 1)
    stack.fleet.specs.clear()
    stack.fleet.script = held
    asking = asyncio.create_task(ask(stack, body, headers))
    await eventually(lambda: stack.proxy.gateway.inflight > 0 and tokens_of(stack) == many)
    stack.fleet.script = Script(reply=reply)
    found = disturb(stack.fleet.specs[0])
    if found is not None:
        await found
    await eventually(lambda: len(stack.fleet.specs) > 1 or asking.done())
    held.hold.set()  # the earlier incarnation still sends tokens: nobody reads them
    return await asyncio.wait_for(asking, HANG_S)


def tokens_of(stack):
    return sum(r.completion_tokens for r in stack.proxy.gateway.requests)


async def break_stream(fleet, spec):
    """Its stream ends with an event that the instance has no longer."""
    await fleet.stop_decode()
    fleet.tokens[spec.proxy.id].count += 1
    await fleet.start_decode()


DISTURBANCES = {
    "moved": lambda fleet: fleet.move,
    "broken": lambda fleet: lambda spec: break_stream(fleet, spec),
    "failed": lambda fleet: lambda spec: fleet.fail(spec, "decode died", resumable=True),
    "placed again": lambda fleet: fleet.place,
}


async def until_finished(stack, spec, state):
    async def holds():
        return await stack.state_of(spec.request_id) == state

    await eventually(holds)
