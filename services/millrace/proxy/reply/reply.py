"""Gathers the output of requests into HTTP responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import orjson

from millrace.proxy.errors import ApiError
from millrace.proxy.generation.choice import Choice, LogprobEntry, Piece
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.generation.sink import Sink
from millrace.proxy.reply.event_numbers import EventNumbers
from millrace.proxy.reply.formats import DONE, Format, Usage, Whole
from millrace.proxy.reply.parsed import ParsedAnswer
from millrace.proxy.request.options import Options

Json = dict[str, Any]


class Signal:
    """Wakes the one task that waits for the signal; a wake before the wait is not lost."""

    __slots__ = ("_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        if not self._set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._set = False


class Progress:
    """Tracks a response's requests, their ends and the error. Both kinds of reply use it."""

    __slots__ = (
        "_open_requests",
        "error",
        "explain",
        "finished",
        "requests",
        "signal",
    )

    def __init__(self, explain: Callable[[list[ProxyRequest]], Json] | None) -> None:
        """`explain` builds the trace of all requests; None if the client asked for no trace."""
        self.requests: list[ProxyRequest] = []
        self._open_requests = 0
        self.explain = explain
        self.signal = Signal()
        self.error: ApiError | None = None
        #: True once all requests have ended or one has failed: no more output comes.
        self.finished = False

    def add(self, request: ProxyRequest) -> None:
        self.requests.append(request)
        self._open_requests += 1

    @property
    def ended(self) -> int:
        """The number of requests that have ended without an error."""
        return len(self.requests) - self._open_requests

    def done(self) -> None:
        """Counts one request that has ended without an error."""
        self._open_requests -= 1
        if self._open_requests == 0:
            self.finished = True
        self.signal.wake()

    def fail(self, error: ApiError) -> None:
        """Sets the response's error; the first error stays."""
        if not self.finished:
            self.error = error
            self.finished = True
            self.signal.wake()

    def choice_usage(self, choice: Choice) -> Usage:
        """Returns the usage of one choice so far: its own prompt and its own tokens."""
        request = self.request_of(choice)
        return Usage(
            prompt_tokens=request.prompt_tokens,
            completion_tokens=choice.token_count,
            cached_tokens=request.cached_tokens,
        )

    def request_of(self, choice: Choice) -> ProxyRequest:
        """Returns the request that a choice belongs to."""
        return self.requests[choice.index // len(self.requests[0].choices)]

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(g.prompt_tokens for g in self.requests),
            completion_tokens=sum(g.completion_tokens for g in self.requests),
            cached_tokens=sum(g.cached_tokens for g in self.requests),
        )

    def extra(self) -> Json:
        """Returns the fields beside `choices` at the end."""
        return {"millrace": self.explain(self.requests)} if self.explain else {}


class GeneratingReply(Sink, Protocol):
    """A reply that gathers the output of its requests."""

    @property
    def progress(self) -> Progress: ...


class EventReply(GeneratingReply, Protocol):
    """A reply that is sent as server-sent events."""

    #: True while no output came since `silent` was last set.
    silent: bool

    #: Whether the client asked for events of its prompt's progress.
    shows_progress: bool

    def take(self) -> bytes:
        """Returns all events that are ready, or empty bytes."""

    def comment(self, text: bytes) -> None:
        """Adds a line that clients skip."""

    def show_progress(self, document: Json) -> None:
        """Adds an event `millrace.progress`, for a client that asked for it."""

    def failure(self, error: ApiError) -> bytes:
        """Returns the last events of a stream that ends with `error`."""


class DocumentReply(GeneratingReply, Protocol):
    """A reply that is sent as one JSON document."""

    def document(self) -> bytes:
        """Returns the response's body. Call it once `progress.finished` is true."""


class StreamReply:
    """Gathers server-sent events; all events that are ready are sent in one piece."""

    __slots__ = (
        "_answers",
        "_continuous_usage",
        "_format",
        "_frames",
        "_include_usage",
        "_numbers",
        "_open_choices",
        "_out",
        "progress",
        "shows_progress",
        "silent",
    )

    def __init__(
        self,
        fmt: Format,
        choices: int,
        options: Options,
        progress: Progress,
        answers: Sequence[ParsedAnswer] = (),
        numbers: EventNumbers | None = None,
    ) -> None:
        """`choices` counts the choices of the whole response.

        `answers` parse the choices' text; empty if all of the text is content. `numbers` give the
        events their ids; None: the events have no ids.
        """
        self._numbers = numbers
        self._format = fmt
        self._answers = answers
        self._frames: list[tuple[bytes, bytes] | None] = [None] * choices
        self._open_choices = choices
        self._include_usage = options.include_usage
        self._continuous_usage = options.continuous_usage
        self._out: list[bytes] = []
        #: True while no output came since `silent` was last set.
        self.silent = True
        self.shows_progress = options.include_progress
        self.progress = progress

    def take(self) -> bytes:
        """Returns all output that is ready, or empty bytes."""
        out, self._out = self._out, []
        return out[0] if len(out) == 1 else b"".join(out)

    def comment(self, text: bytes) -> None:
        """Adds a line that clients skip: it shows proxies in between that the connection lives."""
        self._out.append(b": " + text + b"\n\n")
        self.progress.signal.wake()

    def show_progress(self, document: Json) -> None:
        """Adds an event of its own name: clients of OpenAI's API would read it as a chunk."""
        self._out.append(b"event: millrace.progress\ndata: " + orjson.dumps(document) + b"\n\n")
        self.progress.signal.wake()

    def failure(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that ends with `error`."""
        return failure_of_stream(error)

    def on_text(self, choice: Choice, text: str) -> None:
        if self._answers:
            self.on_piece(choice, Piece(text=text))
            return
        self.silent = False
        frame = self._frames[choice.index] or self._open(choice)
        if text and self._continuous_usage:
            piece = Piece(text=text)
            self._emit(self._format.piece(choice.index, piece, self._usage_so_far(choice)))
        elif text:
            self._emit(frame[0] + orjson.dumps(text) + frame[1])
        if choice.finish_reason is not None:
            self._close(choice)
        self.progress.signal.wake()

    def on_piece(self, choice: Choice, piece: Piece) -> None:
        self.silent = False
        if self._frames[choice.index] is None:
            self._open(choice)
        for shown in self._parsed(choice, piece) if self._answers else (piece,):
            if shown.text or shown.entries or shown.token_ids or shown.delta:
                so_far = self._usage_so_far(choice)
                self._emit(self._format.piece(choice.index, shown, so_far))
        if choice.finish_reason is not None:
            self._close(choice)
        self.progress.signal.wake()

    def _parsed(self, choice: Choice, piece: Piece) -> list[Piece]:
        """Returns one piece per delta; the first has the log probabilities and the token ids."""
        ends = choice.finish_reason is not None
        deltas = self._answers[choice.index].deltas(piece.text, ends=ends)
        first, *more = deltas or [{}]
        found = Piece(delta=first, entries=piece.entries, token_ids=piece.token_ids)
        return [found, *(Piece(delta=delta) for delta in more)]

    def echo(self, choice: Choice, piece: Piece) -> None:
        """Adds the prompt before the choice's own text."""
        self._open(choice)
        self._emit(self._format.piece(choice.index, piece, self._usage_so_far(choice)))

    def on_done(self, request: ProxyRequest) -> None:
        self.progress.done()
        if self.progress.finished:
            self._emit(DONE)

    def on_error(self, error: ApiError) -> None:
        self.progress.fail(error)

    def _emit(self, event: bytes) -> None:
        self._out.append(event if self._numbers is None else self._numbers.numbered(event))

    def _open(self, choice: Choice) -> tuple[bytes, bytes]:
        frame = self._frames[choice.index] = self._format.text_frame(choice.index)
        if opening := self._format.opening(choice.index, self._usage_at_start(choice)):
            self._emit(opening)
        return frame

    def _close(self, choice: Choice) -> None:
        self._open_choices -= 1
        last = self._open_choices == 0
        extra = self.progress.extra() if last else {}
        so_far = self._usage_so_far(choice)
        reason = choice.finish_reason
        if self._answers:
            reason = self._answers[choice.index].finish_reason(reason)
        if last and self._include_usage:
            self._emit(self._format.closing(choice, reason, so_far))
            self._emit(self._format.usage(self.progress.usage(), extra))
        else:
            self._emit(self._format.closing(choice, reason, so_far | extra))

    def _usage_so_far(self, choice: Choice) -> Json:
        """Returns the usage that a chunk of this choice shows."""
        if not self._continuous_usage:
            return {}
        return {"usage": self.progress.choice_usage(choice).to_dict()}

    def _usage_at_start(self, choice: Choice) -> Json:
        """Returns the usage that the chunk before a choice's first token shows."""
        if not self._continuous_usage:
            return {}
        return {"usage": replace(self.progress.choice_usage(choice), completion_tokens=0).to_dict()}


def failure_of_stream(error: ApiError) -> bytes:
    """Returns the event of an error in a stream of OpenAI's API."""
    return b"data: " + error.body() + b"\n\n"


class WholeReply:
    """Gathers the output into one JSON document at the end."""

    __slots__ = ("_answers", "_best", "_format", "_wholes", "progress")

    def __init__(
        self,
        fmt: Format,
        choices: int,
        progress: Progress,
        answers: Sequence[ParsedAnswer] = (),
        best: int | None = None,
    ) -> None:
        """`answers` parse the choices' text; empty if all of the text is content. `best`: so many
        of each prompt's choices are answered, those with the likeliest tokens; None: all.
        """
        self._best = best
        self._format = fmt
        self._answers = answers
        self._wholes: list[Whole | None] = [None] * choices
        self.progress = progress

    def document(self) -> bytes:
        """Returns the response's body. Call it once `progress.finished` is true."""
        wholes = [whole for whole in self._wholes if whole is not None]
        if self._best is not None:
            wholes = self._likeliest(wholes, self._best)
        for whole in wholes:
            whole.of_prompt = self.progress.request_of(whole.choice).prompt_logprobs
        return self._format.document(wholes, self.progress.usage(), self.progress.extra())

    def _likeliest(self, wholes: list[Whole], best: int) -> list[Whole]:
        """Returns the `best` choices of every prompt, the likeliest first."""
        made = len(self.progress.requests[0].choices)
        return [
            whole
            for first in range(0, len(wholes), made)
            for whole in sorted(wholes[first : first + made], key=lambda w: -w.mean_logprob)[:best]
        ]

    def on_text(self, choice: Choice, text: str) -> None:
        self._whole(choice).text.append(text)

    def on_piece(self, choice: Choice, piece: Piece) -> None:
        whole = self._whole(choice)
        whole.text.append(piece.text)
        whole.entries.extend(piece.entries)
        whole.token_ids.extend(piece.token_ids)

    def echo(self, choice: Choice, piece: Piece) -> None:
        """Adds the prompt before the choice's own text."""
        self.on_piece(choice, piece)

    def on_done(self, request: ProxyRequest) -> None:
        self.progress.done()

    def on_error(self, error: ApiError) -> None:
        self.progress.fail(error)

    def _whole(self, choice: Choice) -> Whole:
        whole = self._wholes[choice.index]
        if whole is None:
            entries: list[LogprobEntry] = []
            answer = self._answers[choice.index] if self._answers else None
            whole = self._wholes[choice.index] = Whole(choice, [], entries, [], answer)
        return whole


Reply = StreamReply | WholeReply
