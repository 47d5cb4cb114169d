"""One engine request of the proxy's, from its submission to its last token."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from millrace.core.request import Slo
from millrace.core.span import Span
from millrace.proxy.choice import Choice, Piece
from millrace.proxy.codec import Life, position_logprobs
from millrace.proxy.echo import Echo
from millrace.proxy.errors import ApiError
from millrace.wire.pb import decode_pb2
from millrace.wire.trace_codec import spans_from_wire


class Stage(Enum):
    """How far a request has come, as its proxy sees it."""

    SUBMITTED = "submitted"  # the scheduler has not answered yet
    PLACED = "placed"  # tokens will come from `decode`
    UNPLACED = "unplaced"  # its decode's stream broke before token one: a new place must come
    STREAMING = "streaming"  # tokens have come
    ENDED = "ended"


class Sink(Protocol):
    """The response that a request's output goes to."""

    def on_text(self, choice: Choice, text: str) -> None:
        """Plain text of a choice; may be empty when the choice has just finished."""

    def on_piece(self, choice: Choice, piece: Piece) -> None:
        """Text with log probabilities or token ids."""

    def echo(self, choice: Choice, piece: Piece) -> None:
        """The prompt, before a choice's first text."""

    def on_done(self, generation: Generation) -> None:
        """All choices of a request have finished."""

    def on_error(self, error: ApiError) -> None:
        """The response can't be finished."""


class Generation:
    """What the proxy holds of one request. Times are the event loop's clock, in seconds."""

    __slots__ = (
        "_detailed",
        "_early",
        "_echo",
        "_open_choices",
        "arrived_at",
        "cached_tokens",
        "choices",
        "confirmed",
        "decode",
        "first_token_at",
        "last_token_at",
        "placed_at",
        "predicted_ttft_s",
        "prompt_tokens",
        "request_id",
        "sink",
        "slo",
        "spans",
        "stage",
        "started_at",
        "waiting_since",
    )

    def __init__(
        self,
        *,
        request_id: str,
        sink: Sink,
        choices: list[Choice],
        prompt_tokens: int,
        slo: Slo,
        detailed: bool,
        echo: Echo | None,
        arrived_at: float,
    ) -> None:
        """`detailed`: choices show log probabilities or ids, not plain text alone."""
        self.request_id = request_id
        self.sink = sink
        self.choices = choices
        self.prompt_tokens = prompt_tokens
        self.slo = slo
        self._detailed = detailed
        self._echo = echo
        self._open_choices = len(choices)
        self.stage = Stage.SUBMITTED
        self.decode: Life | None = None
        #: Events of an instance that its placement on, still on the way, may name.
        self._early: dict[Life, list[decode_pb2.TokenEvent]] = {}
        self.arrived_at = self.started_at = arrived_at
        #: When the wait that its stage means began; the watch over time-outs reads it.
        self.waiting_since = arrived_at
        self.placed_at: float | None = None
        #: The scheduler's own word of its place came; tokens may outrun it.
        self.confirmed = False
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        self.predicted_ttft_s = 0.0
        self.cached_tokens = 0
        self.spans: list[Span] = []

    @property
    def completion_tokens(self) -> int:
        return sum(choice.token_count for choice in self.choices)

    @property
    def stopped_by_proxy(self) -> bool:
        """Whether the engine may still be at work on a choice that met a stop string."""
        return any(choice.met_stop_string for choice in self.choices)

    def place(self, decode: Life, predicted_ttft_s: float, now: float) -> None:
        self.stage, self.decode = Stage.PLACED, decode
        self.predicted_ttft_s = predicted_ttft_s
        self.placed_at = self.waiting_since = now

    def keep(self, decode: Life, event: decode_pb2.TokenEvent) -> None:
        """An event of an instance that is not the request's, or not yet: streams run apart."""
        self._early.setdefault(decode, []).append(event)

    def take_kept(self, decode: Life) -> list[decode_pb2.TokenEvent]:
        """The events kept of this instance, in order; they are forgotten, as are all others'."""
        kept = self._early.get(decode, [])
        self._early = {}
        return kept

    def has_kept(self, decode: Life) -> bool:
        return decode in self._early

    def take(self, event: decode_pb2.TokenEvent, now: float) -> float | None:
        """Takes one event; returns the gap to the choice's token before, in seconds."""
        if self.first_token_at is None:
            self._begin(event, now)
        self.last_token_at = now
        if event.spans:
            self.spans.extend(spans_from_wire(event.spans))
        choice = self.choices[event.choice]
        gap = None if choice.last_token_at is None else now - choice.last_token_at
        choice.last_token_at = now
        if choice.finish_reason is not None:
            return gap  # what the engine made before it heard of the stop string
        reason = event.finish_reason
        if self._detailed:
            self.sink.on_piece(choice, self._piece(choice, event))
        else:
            text = choice.feed(event.token_ids, reason, event.stop_token_id if reason else -1)
            if text or choice.finish_reason is not None:
                self.sink.on_text(choice, text)
        if choice.finish_reason is not None:
            self._open_choices -= 1
            if self._open_choices == 0:
                self.stage = Stage.ENDED
                self.sink.on_done(self)
        return gap

    def _begin(self, event: decode_pb2.TokenEvent, now: float) -> None:
        self.stage = Stage.STREAMING
        self.first_token_at = now
        self.cached_tokens = event.cached_tokens
        if self._echo is not None:
            piece = self._echo.piece([position_logprobs(p) for p in event.prompt_logprobs])
            for choice in self.choices:
                self.sink.echo(choice, piece)

    def _piece(self, choice: Choice, event: decode_pb2.TokenEvent) -> Piece:
        reason = event.finish_reason
        stop_id = event.stop_token_id if reason else -1
        if event.logprobs:
            positions = [position_logprobs(p) for p in event.logprobs]
            piece = choice.feed_logprobs(event.token_ids, positions, reason, stop_id)
        else:
            piece = Piece(text=choice.feed(event.token_ids, reason, stop_id))
        piece.token_ids = choice.take_ids()
        return piece
