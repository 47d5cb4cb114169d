"""Gathers a request's output into a response of /v1/responses: its events and its document."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from millrace.proxy.errors import ApiError
from millrace.proxy.generation.choice import Choice, Piece
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.reply.formats import Usage, shown_logprob
from millrace.proxy.reply.item_reply import ItemReply
from millrace.proxy.reply.parsed import ParsedAnswer
from millrace.proxy.reply.reply import Progress
from millrace.proxy.reply.response_items import ResponseItems
from millrace.proxy.text.tokenizer import Tokenizer

Json = dict[str, Any]

#: The state of a response whose text has ended, and its reason, by the choice's finish reason.
_ENDS: dict[str, tuple[str, Json | None]] = {
    "length": ("incomplete", {"reason": "max_output_tokens"}),
}
#: How the last event of a stream begins.
_LAST_EVENTS = tuple(
    b"event: response.%s\n" % state for state in (b"completed", b"incomplete", b"failed")
)


def event_of(kind: str, number: int, **fields: object) -> bytes:
    """Returns an event of a stream, as server-sent."""
    event = {"type": kind, "sequence_number": number, **fields}
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps(event))


def ends_stream(event: bytes) -> bool:
    """Returns whether no event follows this one."""
    return event.startswith(_LAST_EVENTS)


class ResponseReply(ItemReply):
    """Gathers the items, and the events if `streams`. A place in `events` is an event's number."""

    __slots__ = ("_head", "_streams", "_tokenizer", "events", "status")

    def __init__(
        self,
        head: Json,
        progress: Progress,
        answer: ParsedAnswer | None,
        tokenizer: Tokenizer,
        *,
        streams: bool,
    ) -> None:
        """`head` holds the fields that never change. A background response begins as queued.

        `answer` as in `ItemReply`. `tokenizer` writes the tokens of log probabilities.
        """
        super().__init__(answer, ResponseItems(head["id"]), progress)
        self._head = head
        self._streams = streams
        self._tokenizer = tokenizer
        self.status = "queued" if head["background"] else "in_progress"
        #: Every event so far, server-sent.
        self.events: list[bytes] = []

    @property
    def response_id(self) -> str:
        return str(self._head["id"])

    def document(self) -> bytes:
        """Returns the response as it is now. Its output comes when it has ended."""
        return orjson.dumps(self.to_dict())

    def begin(self) -> None:
        """Adds the first event. Without this call it comes with the first text."""
        self._emit_state("created")

    def on_done(self, request: ProxyRequest) -> None:
        self._emit_state(self.status)
        self.progress.done()

    def failure(self, error: ApiError) -> bytes:
        """Returns the last events of a stream that ends with `error`."""
        self.fail(error)
        return self.take()

    def fail(self, error: ApiError) -> None:
        """Adds the last event of a response that has failed."""
        self.status = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._head |= {"error": {"code": code, "message": error.message}, **_ended_now()}
        if not self.events:
            self.begin()
        self._emit_state("failed")

    def to_dict(self) -> Json:
        ended = self.status in ("completed", "incomplete")
        document = self._head | {"status": self.status, "output": [], "usage": None}
        if ended:
            document["output"] = self._items.documents()
            document["usage"] = usage(self.progress.usage())
            document["incomplete_details"] = dict(_ENDS.values()).get(self.status)
            document |= self.progress.extra()
        return document

    def _open(self) -> None:
        self.status = "in_progress"
        if not self.events:
            self.begin()
        self._emit_state("in_progress")

    def _shown(self, piece: Piece) -> Sequence[Json]:
        return [shown_logprob(entry, self._tokenizer) for entry in piece.entries]

    def _end(self, choice: Choice) -> None:
        self.status, _ = _ENDS.get(choice.finish_reason or "", ("completed", None))
        self._items.end(self.status)
        self._head |= _ended_now()

    def _emit_state(self, state: str) -> None:
        if self._streams:
            self._emit(f"response.{state}", response=self.to_dict())

    def _emit(self, kind: str, **fields: object) -> None:
        if self._streams:
            event = event_of(kind, len(self.events), **fields)
            self.events.append(event)
            self._out.append(event)


def _ended_now() -> Json:
    return {"completed_at": int(time.time())}


def usage(counted: Usage) -> Json:
    """Returns a usage as /v1/responses shows it."""
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.cached_tokens},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
    }


def head(response_id: str, created: int, fields: Json, temperature: float, top_p: float) -> Json:
    """Returns the fields of a response that repeat the request's."""
    named = fields.get("conversation")
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "background": bool(fields.get("background", False)),
        "conversation": {"id": named} if isinstance(named, str) else named,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": fields.get("max_tool_calls"),
        "metadata": fields.get("metadata", {}),
        "model": fields["model"],
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": fields.get("previous_response_id"),
        "reasoning": {"effort": fields.get("reasoning", {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": fields.get("store", True),
        "temperature": temperature,
        "text": {"format": fields.get("text", {}).get("format") or {"type": "text"}},
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools", []),
        "top_logprobs": fields.get("top_logprobs", 0),
        "top_p": top_p,
        "truncation": fields.get("truncation", "disabled"),
        "user": fields.get("user"),
    }
