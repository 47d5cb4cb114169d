"""/v1/responses: creates responses by the path of chat completions, and serves stored responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from millrace.proxy.errors import ApiError, bad_field
from millrace.proxy.http.asgi import Receive, Scope, Send, receive_body, send_document, send_json
from millrace.proxy.http.client import Client, send_parts
from millrace.proxy.http.endpoints.generate import Entry, Runs, Services
from millrace.proxy.http.query import flag, number, page_of, query_of
from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.prompts import EnginePrompt
from millrace.proxy.reply.builder import Arrival
from millrace.proxy.reply.response import ResponseReply, ends_stream, head
from millrace.proxy.request.item_ids import new_response_id
from millrace.proxy.request.options import Options
from millrace.proxy.request.responses import (
    RESPONSE_NAMES,
    ResponseRequest,
    most_dropped,
    read_as_chat,
    read_response,
)
from millrace.proxy.responses import StoredResponses, source_of

Json = dict[str, Any]

RESPONSES_PATH = "/v1/responses"
RESPONSE_PATH = RESPONSES_PATH + "/{response_id}"

#: How often a stream of a stored response looks for new events.
_POLL_S = 0.05
#: How often it looks whether the response was cancelled or lost: that reads the whole response.
_CHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, the messages before it, and its prompt."""

    request: ResponseRequest
    history: Sequence[Json]
    prompt: EnginePrompt
    options: Options


class CreateResponse:
    """Answers POST /v1/responses."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._entry = Entry(services)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        at, unix_s = time.monotonic(), time.time_ns() / 1e9
        most_bytes = self._services.config.proxy.max_body_bytes
        body = await receive_body(scope, receive, most_bytes)
        arrival = self._entry.arrival(scope, at, unix_s)
        model = self._entry.model(body, scope, arrival.id_digits)
        creation = _Creation(self._services, model, arrival)
        return await creation.answer(body, scope, receive, send)


class _Creation:
    """One request for a response, answered by one model."""

    def __init__(self, services: Services, model: ServedModel, arrival: Arrival) -> None:
        self._services = services
        self._model = model
        self._arrival = arrival
        self._response_id = new_response_id()
        self._runs = Runs(services, model)
        self._builder = model.builder(chat=True)

    async def answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        services = self._services
        asked = await self._read(body, self._arrival.tenant)
        arrival = Entry(services).stated(scope, self._arrival, asked.options)
        self._model.gateway.admit(1)
        reply = self._reply(asked, arrival)
        client = Client(receive, send, reply.response_id)
        if asked.request.background:
            return await self._start(asked, reply, arrival, client)

        settle = partial(self._keep, asked, reply)
        if asked.request.stream:
            return await self._runs.send_stream(reply, client, arrival, settle)
        return await self._runs.send_whole(reply, client, arrival, settle)

    async def _keep(self, asked: _Asked, reply: ResponseReply) -> None:
        """Keeps a complete response, and adds its turn to its conversation."""
        source = source_of(asked.request, asked.history)
        if asked.request.store:
            await self._services.responses.keep(reply, self._arrival.tenant, source)
        await self._join(asked.request, reply)

    async def _join(self, request: ResponseRequest, reply: ResponseReply) -> None:
        """Adds the turn of a complete response to its conversation, if it has one."""
        if request.conversation is not None:
            items = [*request.items, *reply.to_dict()["output"]]
            conversations, tenant = self._services.conversations, self._arrival.tenant
            await conversations.keep(request.conversation, tenant, items)

    async def _read(self, body: bytes, tenant: str) -> _Asked:
        request = read_response(self._model.bodies, body, self._response_id)
        items = await self._services.responses.referenced(request.items, tenant)
        request = replace(request, items=items)
        history: list[Json] = []
        if request.previous is not None:
            history = await self._services.responses.history(request.previous, tenant)
        if (named := request.conversation) is not None:
            found = await self._services.conversations.find(named, tenant, "conversation")
            history = found.messages
        prompt, options = await self._prompt(request, history, 0)
        if request.truncates and not self._fits(prompt, options):
            prompt, options = await self._shortened(request, history)
        with RESPONSE_NAMES.used():
            await self._runs.check_constraint(options)
        [prompt] = await self._runs.prepared([prompt], options)
        return _Asked(request, history, prompt, options)

    async def _shortened(
        self, request: ResponseRequest, history: Sequence[Json]
    ) -> tuple[EnginePrompt, Options]:
        """Returns the prompt without as few of the oldest messages as needed, by bisection.

        The last message stays, whether it fits or not; so does the call that it answers.
        """
        low, high = 1, most_dropped([*history, *request.messages])
        while low < high:
            dropped = (low + high) // 2
            if self._fits(*await self._prompt(request, history, dropped)):
                high = dropped
            else:
                low = dropped + 1
        return await self._prompt(request, history, max(0, high))

    async def _prompt(
        self, request: ResponseRequest, history: Sequence[Json], dropped: int
    ) -> tuple[EnginePrompt, Options]:
        chat = read_as_chat(self._model.bodies, request, history, dropped)
        with RESPONSE_NAMES.used():
            return await self._model.prompts.read_chat(chat.conversation), chat.options

    def _fits(self, prompt: EnginePrompt, options: Options) -> bool:
        wanted = options.sampling.max_tokens or 1
        return prompt.ids.size + wanted <= self._model.limits.context_tokens

    def _reply(self, asked: _Asked, arrival: Arrival) -> ResponseReply:
        """Returns the reply with its request, ready to be submitted."""
        response_id = self._response_id
        sampling, request = asked.options.sampling, asked.request
        fields = head(
            response_id,
            int(arrival.unix_s),
            {**request.fields, "model": self._model.name},
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        answers = self._builder.answers(asked.prompt, asked.options, response_id)
        reply = ResponseReply(
            fields,
            self._builder.progress(arrival),
            answers[0] if answers else None,
            self._model.tokenizer,
            streams=request.stream,
        )
        with RESPONSE_NAMES.used():
            self._builder.requests(response_id, reply, [asked.prompt], asked.options, arrival)
        return reply

    async def _start(
        self, asked: _Asked, reply: ResponseReply, arrival: Arrival, client: Client
    ) -> int:
        """Starts a background response, and answers with its first state or its events."""
        responses, streams = self._services.responses, asked.request.stream
        reply.begin()
        source = source_of(asked.request, asked.history)
        await self._runs.admit(reply, arrival)
        try:
            await responses.create(reply, arrival.tenant, source)
        except ApiError:
            self._runs.end(reply, arrival)
            raise
        first = reply.document()
        self._services.background.start(
            reply,
            submit=lambda: self._runs.submit(reply),
            end=lambda: self._runs.end(reply, arrival),
            settle=lambda: self._join(asked.request, reply),
        )
        if not streams:
            await send_json(client.send, 200, first)
            return 200
        return await _send_events(self._services, reply.response_id, arrival.tenant, 0, client)


class StoredEndpoints:
    """Answers the requests about stored responses."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def retrieve_or_delete(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answers GET and DELETE of one response."""
        response_id, tenant = self._named(scope)
        if scope["method"] == "DELETE":
            await self._services.responses.delete(response_id, tenant)
            deleted = {"id": response_id, "object": "response", "deleted": True}
            return await send_document(send, deleted)
        query = query_of(scope)
        found = await self._services.responses.find(response_id, tenant)
        if not flag(query, "stream"):
            return await send_document(send, found.body)
        if not (found.source.streams and found.body["background"]):
            wrong = "only a response that was created with 'background' and 'stream' can be."
            raise bad_field("stream", wrong)
        start = number(query, "starting_after", -1, 0, 2**53) + 1
        client = Client(receive, send, response_id)
        return await _send_events(self._services, response_id, tenant, start, client)

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> int:
        return await send_document(send, await self._services.responses.cancel(*self._named(scope)))

    async def input_items(self, scope: Scope, receive: Receive, send: Send) -> int:
        found = await self._services.responses.find(*self._named(scope))
        return await send_document(send, page_of(found.source.items, query_of(scope)))

    def _named(self, scope: Scope) -> tuple[str, str]:
        """Returns the id of the response and the tenant."""
        return scope["path_params"]["response_id"], self._services.tenants.of(scope)


async def _send_events(
    services: Services, response_id: str, tenant: str, start: int, client: Client
) -> int:
    """Sends the events from number `start` on as they come to the store, from any replica."""
    final = (await services.responses.find(response_id, tenant)).final
    parts = _events(services.responses, response_id, tenant, start, final=final)
    return await send_parts(client, parts, services.config.proxy.keepalive_s)


async def _events(
    responses: StoredResponses, response_id: str, tenant: str, start: int, *, final: bool
) -> AsyncGenerator[bytes, None]:
    """Yields the events as they come, and empty bytes whenever there is none."""
    unchecked_s = 0.0
    try:
        while True:
            events = await responses.events(response_id, start)
            start += len(events)
            yield b"".join(events)
            if final or (events and ends_stream(events[-1])):
                return
            await asyncio.sleep(_POLL_S)
            unchecked_s += _POLL_S
            if unchecked_s >= _CHECK_S:
                unchecked_s = 0.0
                final = (await responses.find(response_id, tenant)).final
    except ApiError as error:  # deleted meanwhile, or the store is out of reach
        yield b"event: error\ndata: " + error.body() + b"\n\n"
