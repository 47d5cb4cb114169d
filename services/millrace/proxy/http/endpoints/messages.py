"""/v1/messages: answers requests of Anthropic's API by the path of chat completions."""

from __future__ import annotations

import time
from typing import Any

from millrace.proxy.errors import bad_field
from millrace.proxy.http.asgi import Receive, Scope, Send, header, receive_body
from millrace.proxy.http.client import Client
from millrace.proxy.http.endpoints.generate import Entry, Runs, Services
from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.reply.builder import Arrival
from millrace.proxy.reply.message import MessageReply
from millrace.proxy.request.anthropic import MESSAGE_NAMES, read_as_chat
from millrace.proxy.request.reading import read_body
from millrace.proxy.request.validation import ChatRequest
from millrace.proxy.streams.source import RESUMABLE_HEADER


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
        if header(scope, RESUMABLE_HEADER.encode()) not in (None, "0"):
            wrong = "streams of messages can't be resumed."
            raise bad_field(RESUMABLE_HEADER, wrong, "unsupported_parameter")
        model = self._entry.model(body, scope, arrival.id_digits)
        chat = _read(model, read_body(model.bodies.types.message, body))
        arrival = self._entry.stated(scope, arrival, chat.options)
        runs = Runs(self._services, model)
        with MESSAGE_NAMES.used():
            reply = await _build(model, runs, chat, arrival)
        client = Client(receive, send, reply.message_id)
        if chat.options.stream:
            return await runs.send_stream(reply, client, arrival)
        return await runs.send_whole(reply, client, arrival)


async def _build(
    model: ServedModel, runs: Runs, chat: ChatRequest, arrival: Arrival
) -> MessageReply:
    """Returns the reply with its request, ready to be submitted. Raises ApiError."""
    options = chat.options
    await runs.check_constraint(options)
    prompt = await model.prompts.read_chat(chat.conversation)
    [prompt] = await runs.prepared([prompt], options)
    model.gateway.admit(1)
    message_id, builder = f"msg_{arrival.id_digits}", model.builder(chat=True)
    answers = builder.answers(prompt, options, message_id)
    reply = MessageReply(
        message_id,
        model.name,
        builder.progress(arrival),
        answers[0] if answers else None,
        streams=options.stream,
    )
    builder.requests(message_id, reply, [prompt], options, arrival)
    return reply


async def count_tokens(model: ServedModel, body: bytes) -> dict[str, Any]:
    """Answers /v1/messages/count_tokens: the tokens of the prompt, which is not computed."""
    chat = _read(model, read_body(model.bodies.types.token_count, body))
    with MESSAGE_NAMES.used():
        prompt = await model.prompts.read_chat(chat.conversation)
    return {"input_tokens": prompt.ids.size}


def _read(model: ServedModel, fields: dict[str, Any]) -> ChatRequest:
    reasons = model.prompts.parsers.reasoning_form != "none"
    return read_as_chat(model.bodies, fields, reasons=reasons)
