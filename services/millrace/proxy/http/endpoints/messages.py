"""/v1/messages: answers requests of Anthropic's API by the path of chat completions."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from millrace.proxy.http.asgi import Receive, Scope, Send, receive_body
from millrace.proxy.http.client import Client
from millrace.proxy.http.endpoints.generate import Entry, Runs, Services
from millrace.proxy.http.endpoints.streams import ResumableSender, wants_resumable
from millrace.proxy.models.messages import build_message, read_message
from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.prompts import EnginePrompt
from millrace.proxy.request.anthropic import MESSAGE_NAMES
from millrace.proxy.request.reading import read_body
from millrace.proxy.request.validation import ChatRequest


class CreateMessage:
    """Answers POST /v1/messages."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._entry = Entry(services)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        at, unix_s = time.monotonic(), time.time_ns() / 1e9
        body = await receive_body(scope, receive, self._services.config.proxy.max_body_bytes)
        arrival = self._entry.arrival(scope, at, unix_s)
        resumable = wants_resumable(scope, self._services.config.proxy)
        model = self._entry.model(body, scope, arrival.id_digits)
        chat = read_message(model, read_body(model.bodies.types.message, body))
        arrival = self._entry.stated(scope, arrival, chat.options)
        runs = Runs(self._services, model)
        with MESSAGE_NAMES.used():
            prompt = await _prompt(model, runs, chat)
            model.gateway.admit(1)
            if resumable:
                client_of = partial(Client, receive, send)
                sender = self._sender(model, runs)
                return await sender.answer(body, [prompt], chat.options, arrival, client_of)
            reply = build_message(model, prompt, chat.options, arrival)
        client = Client(receive, send, reply.message_id)
        if chat.options.stream:
            return await runs.send_stream(reply, client, arrival)
        return await runs.send_whole(reply, client, arrival)

    def _sender(self, model: ServedModel, runs: Runs) -> ResumableSender:
        config = self._services.config.proxy
        return ResumableSender(self._services.streams, model, config, runs, "messages")


async def _prompt(model: ServedModel, runs: Runs, chat: ChatRequest) -> EnginePrompt:
    """Raises ApiError."""
    await runs.check_constraint(chat.options)
    prompt = await model.prompts.read_chat(chat.conversation)
    [prompt] = await runs.prepared([prompt], chat.options)
    return prompt


async def count_tokens(model: ServedModel, body: bytes) -> dict[str, Any]:
    """Answers /v1/messages/count_tokens: the tokens of the prompt, which is not computed."""
    chat = read_message(model, read_body(model.bodies.types.token_count, body))
    with MESSAGE_NAMES.used():
        prompt = await model.prompts.read_chat(chat.conversation)
    return {"input_tokens": prompt.ids.size}
