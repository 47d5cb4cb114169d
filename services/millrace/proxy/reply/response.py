"""Gathers a request's output into a response of /v1/responses: its events and its document."""

from __future__ import annotations

import time
from typing import Any

import orjson

from millrace.proxy.errors import ApiError
from millrace.proxy.generation.choice import Choice, Piece
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.reply.formats import Usage
from millrace.proxy.reply.parsed import ParsedAnswer
from millrace.proxy.reply.reply import Progress
from millrace.proxy.reply.response_items import OutputItems

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


class ResponseReply:
    """Gathers the items, and the events if `streams`. A place in `events` is an event's number."""

    __slots__ = (
        "_comments",
        "_head",
        "_items",
        "_opened",
        "_streams",
        "_taken",
        "events",
        "progress",
        "shows_progress",
        "silent",
        "status",
    )

    def __init__(
        self, head: Json, progress: Progress, answer: ParsedAnswer | None, *, streams: bool
    ) -> None:
        """`head` holds the fields that never change. A background response begins as queued.

        `answer` parses the text; None if all of it is the message's.
        """
        self._head = head
        self._streams = streams
        self._items = OutputItems(answer, self._emit)
        self._comments: list[bytes] = []
        self._taken = 0
        self._opened = False
        self.status = "queued" if head["background"] else "in_progress"
        #: Every event so far, server-sent.
        self.events: list[bytes] = []
        #: True while no output came since `silent` was last set.
        self.silent = True
        #: The events of /v1/responses have a numbering in which no other event has a place.
        self.shows_progress = False
        self.progress = progress

    @property
    def response_id(self) -> str:
        return str(self._head["id"])

    def take(self) -> bytes:
        """Returns all events that are ready, server-sent; or empty bytes."""
        out, self._comments = self._comments, []
        out += self.events[self._taken :]
        self._taken = len(self.events)
        return b"".join(out)

    def comment(self, text: bytes) -> None:
        """Adds a line that clients skip: it shows proxies in between that the connection lives."""
        self._comments.append(b": " + text + b"\n\n")
        self.progress.signal.wake()

    def show_progress(self, document: Json) -> None:
        raise AssertionError("a response shows no progress")

    def document(self) -> bytes:
        """Returns the response as it is now. Its output comes when it has ended."""
        return orjson.dumps(self.to_dict())

    def begin(self) -> None:
        """Adds the first event. Without this call it comes with the first text."""
        self._emit_state("created")

    def on_text(self, choice: Choice, text: str) -> None:
        self.silent = False
        if not self._opened:
            self._open()
        self._items.feed(text)
        if choice.finish_reason is not None:
            self.status, _ = _ENDS.get(choice.finish_reason, ("completed", None))
            self._items.end(self.status)
        self.progress.signal.wake()

    def on_piece(self, choice: Choice, piece: Piece) -> None:
        self.on_text(choice, piece.text)

    def echo(self, choice: Choice, piece: Piece) -> None:
        raise AssertionError("a response echoes no prompt")

    def on_done(self, request: ProxyRequest) -> None:
        self._emit_state(self.status)
        self.progress.done()

    def on_error(self, error: ApiError) -> None:
        self.progress.fail(error)

    def failure(self, error: ApiError) -> bytes:
        """Returns the last events of a stream that ends with `error`."""
        self.fail(error)
        return self.take()

    def fail(self, error: ApiError) -> None:
        """Adds the last event of a response that has failed."""
        self.status = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._head |= {"error": {"code": code, "message": error.message}}
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
        if ended or self.status == "failed":
            document["completed_at"] = int(time.time())
        return document

    def _open(self) -> None:
        self._opened = True
        self.status = "in_progress"
        if not self.events:
            self.begin()
        self._emit_state("in_progress")

    def _emit_state(self, state: str) -> None:
        if self._streams:
            self._emit(f"response.{state}", response=self.to_dict())

    def _emit(self, kind: str, **fields: object) -> None:
        if self._streams:
            self.events.append(event_of(kind, len(self.events), **fields))


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
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "background": bool(fields.get("background", False)),
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
        "top_logprobs": 0,
        "top_p": top_p,
        "truncation": fields.get("truncation", "disabled"),
        "user": fields.get("user"),
    }
