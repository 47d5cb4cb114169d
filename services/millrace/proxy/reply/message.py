"""Gathers a request's output into a message of /v1/messages: its events and its document."""

from __future__ import annotations

from typing import Any

import orjson

from millrace.proxy.errors import ApiError
from millrace.proxy.generation.choice import Choice
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.reply.event_numbers import EventNumbers
from millrace.proxy.reply.item_reply import ItemReply
from millrace.proxy.reply.message_blocks import MessageBlocks
from millrace.proxy.reply.parsed import ParsedAnswer
from millrace.proxy.reply.reply import Progress

Json = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageReply(ItemReply):
    """Gathers the blocks, and the events if `streams`."""

    __slots__ = ("_answer", "_model", "_numbers", "_stop", "_streams", "message_id")

    def __init__(
        self,
        message_id: str,
        model: str,
        progress: Progress,
        answer: ParsedAnswer | None,
        *,
        streams: bool,
        numbers: EventNumbers | None = None,
    ) -> None:
        """`model` is the name that the answer shows; `answer` as in `ItemReply`. `numbers` give the
        events their ids; None: the events have no ids.
        """
        super().__init__(answer, MessageBlocks(), progress)
        self._model = model
        self._answer = answer
        self._streams = streams
        self._numbers = numbers
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}
        self.message_id = message_id

    def comment(self, text: bytes) -> None:
        """Adds a comment, and the event that clients of this API wait for on a silent stream."""
        self._out.append(_PING)
        super().comment(text)

    def document(self) -> bytes:
        """Returns the message. Call it once `progress.finished` is true."""
        counted = self.progress.usage()
        message = self._message(self._items.documents(), counted.completion_tokens)
        return orjson.dumps(message | self.progress.extra())

    def on_done(self, request: ProxyRequest) -> None:
        usage = self._usage(self.progress.usage().completion_tokens)
        self._emit("message_delta", delta=self._stop, usage=usage, **self.progress.extra())
        self._emit("message_stop")
        self.progress.done()

    def failure(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that ends with `error`."""
        return failure_of_message(error)

    def _open(self) -> None:
        self._emit("message_start", message=self._message([], 0))

    def _end(self, choice: Choice) -> None:
        self._items.end("completed")
        reason = choice.finish_reason
        if self._answer is not None:
            reason = self._answer.finish_reason(reason)
        if reason == "stop" and isinstance(choice.stop_reason, str):
            self._stop = {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        else:
            self._stop = {"stop_reason": _STOP_REASONS[reason or "stop"], "stop_sequence": None}

    def _message(self, content: list[Json], output_tokens: int) -> Json:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self._stop,
            "usage": {**self._usage(output_tokens), "service_tier": "standard"},
        }

    def _usage(self, output_tokens: int) -> Json:
        """Returns the usage: Anthropic's API counts cached tokens apart from `input_tokens`."""
        counted = self.progress.usage()
        return {
            "input_tokens": max(0, counted.prompt_tokens - counted.cached_tokens),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counted.cached_tokens,
            "output_tokens": output_tokens,
        }

    def _emit(self, kind: str, **fields: object) -> None:
        if self._streams:
            data = orjson.dumps({"type": kind, **fields})
            event = b"event: %s\ndata: %s\n\n" % (kind.encode(), data)
            self._out.append(event if self._numbers is None else self._numbers.numbered(event))


def failure_of_message(error: ApiError) -> bytes:
    """Returns the event of an error in a stream of /v1/messages."""
    return b"event: error\ndata: %s\n\n" % error.anthropic_body()
