"""One engine request of the proxy's, from its submission to its last token."""

from __future__ import annotations

from array import array
from dataclasses import replace
from enum import Enum
from typing import Protocol

import numpy as np

from millrace.core.request import Slo
from millrace.core.span import Span
from millrace.proxy.codec import Life, position_logprobs
from millrace.proxy.errors import ApiError
from millrace.proxy.generation.choice import Choice, Piece
from millrace.proxy.generation.continuation import continuation
from millrace.proxy.generation.echo import Echo
from millrace.proxy.text.prefix import add_blocks
from millrace.proxy.text.tokenizer import TokenArray
from millrace.wire.codec.trace import spans_from_wire
from millrace.wire.pb import common_pb2, decode_pb2


class Stage(Enum):
    """How far a request has come, as its proxy sees it."""

    SUBMITTED = "submitted"  # the scheduler has not answered yet
    QUEUED = "queued"  # the scheduler has it, and no decode instance has room yet
    PLACED = "placed"  # tokens will come from `decode`
    UNPLACED = "unplaced"  # its decode's stream broke before token one: a new place must come
    STREAMING = "streaming"  # tokens have come
    MOVING = "moving"  # its instance is gone: its next life is being recorded
    PARKED = "parked"  # recorded; waits here for a fleet
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
    """What the proxy holds of one request. Times are the event loop's clock, in seconds.

    To the services a request that goes on elsewhere is another one, with a prompt that ends in what
    was generated so far: `spec` is what they know of it now, `request_id` what the client does.
    """

    __slots__ = (
        "_detailed",
        "_early",
        "_echo",
        "_moved_at",
        "_open_choices",
        "_tokens",
        "arrived_at",
        "cached_tokens",
        "choices",
        "confirmed",
        "decode",
        "first_token_at",
        "last_token_at",
        "losses",
        "moves",
        "orphaned",
        "parked_since",
        "placed_at",
        "predicted_ttft_s",
        "preemptions",
        "prompt_ids",
        "prompt_tokens",
        "request_id",
        "sink",
        "slo",
        "spans",
        "spec",
        "stage",
        "started_at",
        "submitted_at",
        "waiting_since",
    )

    def __init__(
        self,
        *,
        spec: common_pb2.RequestSpec,
        prompt_ids: TokenArray,
        sink: Sink,
        choices: list[Choice],
        slo: Slo,
        detailed: bool,
        echo: Echo | None,
        arrived_at: float,
    ) -> None:
        """`detailed`: choices show log probabilities or ids, not plain text alone."""
        self.request_id = spec.request_id
        self.spec = spec
        #: What the services know as its prompt, int32 [tokens]: kept for its next life, since the
        #: store forgets a request's prompt when its scheduler does.
        self.prompt_ids = prompt_ids
        self.sink = sink
        self.choices = choices
        self.prompt_tokens = spec.prompt_tokens
        self.slo = slo
        self._detailed = detailed
        self._echo = echo
        self._open_choices = len(choices)
        self.stage = Stage.SUBMITTED
        self.decode: Life | None = None
        #: Events of an instance that its placement on, still on the way, may name.
        self._early: dict[Life, list[decode_pb2.TokenEvent]] = {}
        #: Tokens of this life. Only a single choice can go on elsewhere: the others of several
        #: would have prompts of their own.
        self._tokens: array[int] | None = array("i") if len(choices) == 1 else None
        #: How often it went on elsewhere; of these, how often because an instance was lost, and for
        #: want of memory.
        self.moves = 0
        self.losses = 0
        self.preemptions = 0
        #: Since when no token has come for it has no place; None: it has one that gave some.
        self._moved_at: float | None = None
        #: It streamed when the scheduler was lost, which has given it up.
        self.orphaned = False
        self.parked_since: float | None = None
        self.arrived_at = self.started_at = self.submitted_at = arrived_at
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

    @property
    def may_move(self) -> bool:
        """Whether what is left of it can be generated elsewhere."""
        return self._tokens is not None or self.first_token_at is None

    @property
    def has_ended(self) -> bool:
        return self.stage is Stage.ENDED

    @property
    def has_begun(self) -> bool:
        """Whether tokens of it, of this life or an earlier one, have come."""
        return self.first_token_at is not None

    def submit(self, now: float) -> None:
        """The scheduler gets it."""
        if self.stage is Stage.PARKED:
            self._note("parked", self.spec.proxy.id, self.waiting_since, now)
        self.stage, self.waiting_since = Stage.SUBMITTED, now
        if not self.has_begun:
            self.submitted_at = now

    def park(self, now: float) -> None:
        """It waits until there is a fleet."""
        self.stage, self.waiting_since = Stage.PARKED, now
        if self.parked_since is None:
            self.parked_since = now

    def queue(self) -> None:
        """It has no place, any more or yet, and the scheduler's next word will take its time."""
        if self.stage in (Stage.SUBMITTED, Stage.PLACED, Stage.UNPLACED):
            self.stage, self.decode = Stage.QUEUED, None

    def place(self, decode: Life, predicted_ttft_s: float, now: float) -> None:
        # What the scheduler predicts begins when it speaks. A first answer comes at once: it spoke
        # in the middle of the round trip.
        spoke = (self.waiting_since + now) / 2.0 if self.stage is Stage.SUBMITTED else now
        self.stage, self.decode = Stage.PLACED, decode
        self.waiting_since = now
        self.predict(spoke - self.arrived_at + predicted_ttft_s)
        if not self.has_begun:
            self.placed_at = now

    def predict(self, predicted_ttft_s: float) -> None:
        """Notes when token one is to come, from arrival, unless it came in an earlier life."""
        if not self.spec.resumed_tokens:
            self.predicted_ttft_s = predicted_ttft_s

    def move(self, now: float) -> None:
        """Begins its next life, behind the tokens of this one, which become part of its prompt.

        Only where it `may_move`.
        """
        self.moves += 1
        if self._moved_at is None:
            self._moved_at = now
        tokens = np.array(self._tokens or (), dtype=np.int32)
        if tokens.size:
            self.prompt_ids = np.concatenate([self.prompt_ids, tokens])
            self._tokens = array("i")
        self.spec = continuation(self.spec, f"{self.request_id}.{self.moves}", tokens.size)
        add_blocks(self.spec, self.prompt_ids)
        self.stage, self.decode = Stage.MOVING, None
        self._early = {}
        self.confirmed = self.orphaned = False
        self.parked_since = None
        self.waiting_since = now

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
        if event.spans:
            self.note(event)
        if self.stage is not Stage.STREAMING:
            self._begin(event, now)
        self.last_token_at = now
        choice = self.choices[event.choice]
        gap = None if choice.last_token_at is None else now - choice.last_token_at
        choice.last_token_at = now
        if choice.finish_reason is not None:
            return gap  # what the engine made before it heard of the stop string
        token_ids = event.token_ids[:]  # a list: each look at protobuf's own container costs more
        if self._tokens is not None:
            self._tokens.fromlist(token_ids)
        reason = event.finish_reason
        if self._detailed:
            self.sink.on_piece(choice, self._piece(choice, event))
        else:
            text = choice.feed(token_ids, reason, event.stop_token_id if reason else -1)
            if text or choice.finish_reason is not None:
                self.sink.on_text(choice, text)
        if choice.finish_reason is not None:
            self._open_choices -= 1
            if self._open_choices == 0:
                self.stage = Stage.ENDED
                self.sink.on_done(self)
        return gap

    def note(self, event: decode_pb2.TokenEvent) -> None:
        """Takes what an event says of where the time went."""
        for span in spans_from_wire(event.spans):
            if self._moved_at is not None and span.name == "queued":  # since its arrival, it says
                moved_s = self._moved_at - self.arrived_at
                span = replace(span, start_s=min(moved_s, span.end_s))
            self.spans.append(span)

    def _note(self, name: str, instance_id: str, since: float, now: float) -> None:
        self.spans.append(
            Span(
                name=name,
                instance_id=instance_id,
                start_s=since - self.arrived_at,
                end_s=now - self.arrived_at,
            )
        )

    def _begin(self, event: decode_pb2.TokenEvent, now: float) -> None:
        """The first token of this life."""
        self.stage = Stage.STREAMING
        if self._moved_at is not None:
            self._note("moved", self.decode[0] if self.decode else "", self._moved_at, now)
            self._moved_at = None
        if self.has_begun:
            return
        self.first_token_at = now
        if not self.may_move:
            self.prompt_ids = self.prompt_ids[:0].copy()
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
