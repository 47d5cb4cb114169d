"""Reads the bodies of /v1/messages for one model, and makes the replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.prompts import EnginePrompt
from millrace.proxy.reply.builder import Arrival
from millrace.proxy.reply.event_numbers import EventNumbers
from millrace.proxy.reply.message import MessageReply
from millrace.proxy.request.anthropic import read_as_chat
from millrace.proxy.request.options import Options
from millrace.proxy.request.validation import ChatRequest


def read_message(model: ServedModel, fields: Mapping[str, Any]) -> ChatRequest:
    """Returns checked fields of a message, or of a count of tokens, as a chat. Raises ApiError."""
    reasons = model.prompts.parsers.reasoning_form != "none"
    return read_as_chat(model.bodies, fields, reasons=reasons)


def build_message(
    model: ServedModel,
    prompt: EnginePrompt,
    options: Options,
    arrival: Arrival,
    numbers: EventNumbers | None = None,
) -> MessageReply:
    """Returns the reply with its request, ready to be submitted.

    `numbers` give the events of a resumable stream their ids. Raises ApiError as `Builder.build`.
    """
    message_id, builder = f"msg_{arrival.id_digits}", model.builder(chat=True)
    answers = builder.answers(prompt, options, message_id)
    reply = MessageReply(
        message_id,
        model.name,
        builder.progress(arrival),
        answers[0] if answers else None,
        streams=options.stream,
        numbers=numbers,
    )
    builder.requests(message_id, reply, [prompt], options, arrival)
    return reply
