"""What differs between the APIs whose streams can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from millrace.proxy.errors import ApiError
from millrace.proxy.models.messages import build_message, read_message
from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.prompts import EnginePrompt
from millrace.proxy.reply.builder import Arrival
from millrace.proxy.reply.event_numbers import EventNumbers
from millrace.proxy.reply.message import failure_of_message
from millrace.proxy.reply.reply import EventReply, StreamReply, failure_of_stream
from millrace.proxy.request.options import Options
from millrace.proxy.request.reading import read_body

Json = dict[str, Any]

#: Stands for the messages of the prompt, which the options do not depend on.
_NO_MESSAGES: Final = [{"role": "user", "content": "-"}]

Read = Callable[[ServedModel, bytes], Options]
Build = Callable[
    [ServedModel, Sequence[EnginePrompt], Options, Arrival, EventNumbers], tuple[str, EventReply]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamApi:
    """One API: how its streams are read and written again.

    `no_prompt` are the fields of another prompt, in place of the body's own; None: no such field.
    `build` returns the response's id and the reply with its request, and raises ApiError.
    """

    no_prompt: Json
    read_options: Read
    build: Build
    failure: Callable[[ApiError], bytes]

    def without_prompt(self, body: Json) -> Json:
        """Returns a body with another prompt."""
        left_out = {name for name, value in self.no_prompt.items() if value is None}
        changed = body | self.no_prompt
        return {name: value for name, value in changed.items() if name not in left_out}


def _of_openai(*, chat: bool) -> Build:
    def build(
        model: ServedModel,
        prompts: Sequence[EnginePrompt],
        options: Options,
        arrival: Arrival,
        numbers: EventNumbers,
    ) -> tuple[str, EventReply]:
        builder = model.builder(chat=chat)
        response_id, reply, _ = builder.build(prompts, options, arrival, numbers)
        assert isinstance(reply, StreamReply)  # only streams are resumable
        return response_id, reply

    return build


def _message(
    model: ServedModel,
    prompts: Sequence[EnginePrompt],
    options: Options,
    arrival: Arrival,
    numbers: EventNumbers,
) -> tuple[str, EventReply]:
    [prompt] = prompts
    reply = build_message(model, prompt, options, arrival, numbers)
    return reply.message_id, reply


def _message_options(model: ServedModel, body: bytes) -> Options:
    return read_message(model, read_body(model.bodies.types.message, body)).options


APIS: Final[Mapping[str, StreamApi]] = {
    "chat": StreamApi(
        no_prompt={"messages": _NO_MESSAGES},
        read_options=lambda model, body: model.bodies.read_chat(body).options,
        build=_of_openai(chat=True),
        failure=failure_of_stream,
    ),
    "completions": StreamApi(
        no_prompt={"prompt": "-"},
        read_options=lambda model, body: model.bodies.read_completion(body).options,
        build=_of_openai(chat=False),
        failure=failure_of_stream,
    ),
    "messages": StreamApi(
        no_prompt={"messages": _NO_MESSAGES, "system": None},
        read_options=_message_options,
        build=_message,
        failure=failure_of_message,
    ),
}
