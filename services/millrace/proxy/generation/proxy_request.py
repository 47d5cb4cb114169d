"""The state of one engine request in the proxy, from its submission to its last token."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from millrace.core.incarnation import Incarnation
from millrace.core.request import Slo
from millrace.core.request_spec import RequestSpec
from millrace.core.span import EncodedSpan, Span
from millrace.core.token_events import PositionLogprobs, TokenDetail, TokenEvent
from millrace.proxy.generation.adoption import Adoption
from millrace.proxy.generation.choice import Choice
from millrace.proxy.generation.continuation import continuation
from millrace.proxy.generation.echo import Echo
from millrace.proxy.generation.part_sink import PartSink
from millrace.proxy.generation.sink import Sink
from millrace.proxy.generation.stage import Stage
from millrace.proxy.text.encoder_process import TokenArray
from millrace.proxy.text.prefix import with_blocks
from millrace.telemetry.tracing.context import log_fields
from millrace.telemetry.tracing.tracer import NO_SCOPE
from millrace.wire.codec.request_spec import encode_spec
from millrace.wire.codec.token_events import decode_span, encode_spans
from millrace.wire.fleet_messages import OpenRequest


class ProxyRequest:
    """Holds the state of one request in the proxy. Times are the event loop's clock, in seconds.

    A migrated request begins a new incarnation. The other services see the incarnation as another
    request, whose prompt ends in the tokens generated so far. They use its `spec`, and the client
    uses its `request_id`.

    Several choices that have begun need a prompt each: they are migrated as `parts`, requests of
    one choice. Then the gateway serves the parts, and this request gathers their output.
    """

    __slots__ = (
        "_detailed",
        "_early",
        "_echo",
        "_moved_at",
        "_open_choices",
        "_tokens",
        "_whole",
        "adoption",
        "arrived_at",
        "begun_again",
        "cached_tokens",
        "choices",
        "confirmed",
        "decode",
        "encoded_spec",
        "fails_early",
        "first_token_at",
        "fixed_cached_tokens",
        "last_token_at",
        "lineage",
        "moves",
        "on_recorded",
        "parked_since",
        "parts",
        "placed_at",
        "pooled",
        "predicted_ttft_s",
        "preemptions",
        "prompt_ids",
        "prompt_logprobs",
        "prompt_tokens",
        "read_at",
        "recorded",
        "request_id",
        "rewrites",
        "sink",
        "slo",
        "spans",
        "spec",
        "stage",
        "started_at",
        "stored",
        "submitted_at",
        "trace",
        "waiting_since",
        "waits",
        "was_reopened",
    )

    def __init__(
        self,
        *,
        spec: RequestSpec,
        prompt_ids: TokenArray,
        sink: Sink,
        choices: list[Choice],
        slo: Slo,
        detailed: bool,
        echo: Echo | None,
        arrived_at: float,
    ) -> None:
        """`detailed`: choices show log probabilities or token ids beside their text."""
        self.request_id = spec.request_id
        self.spec = spec
        #: Of this incarnation, for the scheduler: set when it is submitted, and again when more is
        #: known of it.
        self.encoded_spec = b""
        #: Whether the store has this incarnation: before that its id may be another request's.
        self.recorded = False
        #: The specs that the store has, or may have, by id: of this incarnation, and of those
        #: before it while none has a token. They never change, and tell records from others'.
        self.stored: dict[str, bytes] = {}
        #: The prompt of this incarnation, int32 [tokens]. The next incarnation needs it: the store
        #: forgets a request's prompt when the scheduler forgets the request.
        self.prompt_ids = prompt_ids
        #: The incarnations' ids begin so.
        self.lineage = spec.request_id
        #: Runs when the store has a migrated request, before the request is submitted; raises
        #: ApiError.
        self.on_recorded: Callable[[], Awaitable[None]] | None = None
        #: Set if another replica began the request: then its own times here are no client's.
        self.adoption: Adoption | None = None
        #: The cached tokens that clients of an adopted request have seen; None: none saw any.
        self.fixed_cached_tokens: int | None = None
        self.sink = sink
        self.choices = choices
        self.prompt_tokens = spec.prompt_tokens
        self.slo = slo
        self._detailed = detailed
        self._echo = echo
        #: The client wants an error instead of a first token after the TTFT objective.
        self.fails_early = False
        self._open_choices = len(choices)
        self.stage = Stage.SUBMITTED
        self.decode: Incarnation | None = None
        #: Events of instances that may be named by a placement that has not arrived yet.
        self._early: dict[Incarnation, list[TokenEvent]] = {}
        #: Tokens of this incarnation, by choice.
        self._tokens = [array("i") for _ in choices]
        #: The requests of its choices, once these are migrated. Each of them knows the whole.
        self.parts: list[ProxyRequest] = []
        self._whole: ProxyRequest | None = None
        #: The number of migrations; those for lack of memory, and of a prompt that was not read.
        self.moves = self.preemptions = self.rewrites = 0
        #: Since when the request waits for the first token of its new instance; None after that.
        self._moved_at: float | None = None
        self.parked_since: float | None = None
        self.arrived_at = self.read_at = self.started_at = self.submitted_at = arrived_at
        #: When the wait of its stage began; the watch over time-outs reads it.
        self.waiting_since = arrived_at
        self.placed_at: float | None = None
        #: `Placed` has come from the scheduler; tokens may come before it. And whether this
        #: incarnation was named to a scheduler, after the one that it was submitted to; and whether
        #: a scheduler may have begun it again, so that an earlier attempt may end its answer.
        self.confirmed = self.was_reopened = self.begun_again = False
        self.first_token_at: float | None = None
        self.last_token_at = self.predicted_ttft_s = 0.0
        self.cached_tokens = 0
        #: The vector of a prefill-only request, float32 little endian; empty before it has come.
        self.pooled = b""
        #: Of every token of the prompt, if requested; None for the first token.
        self.prompt_logprobs: Sequence[PositionLogprobs | None] = ()
        #: The bars of the waterfall that instances sent, and those that the proxy itself adds.
        self.spans: list[EncodedSpan] = []
        self.waits: list[Span] = []
        #: The span of its HTTP request; of an adopted request none is recorded.
        self.trace = NO_SCOPE

    @property
    def completion_tokens(self) -> int:
        return sum(choice.token_count for choice in self.choices)

    def drop_prompt(self) -> None:
        """Frees the prompt of a request that has ended, unless its stream may still need it. The
        request and its reply refer to each other: long prompts would wait for the collector.
        """
        if not self.kept:
            self.prompt_ids = self.prompt_ids[:0].copy()

    def emitted_after(self, known: int) -> list[int]:
        """Returns the tokens after the first `known` tokens, of all incarnations; of one choice."""
        earlier = self.prompt_ids.size - self.prompt_tokens
        (tokens,) = self._tokens
        if known >= earlier:
            return tokens[known - earlier :].tolist()
        return [*self.prompt_ids[self.prompt_tokens + known :].tolist(), *tokens]

    @property
    def stopped_by_proxy(self) -> bool:
        """Whether the engine may still generate tokens of a choice that met a stop string."""
        return any(choice.met_stop_string for choice in self.choices)

    @property
    def is_too_late(self) -> bool:
        """Whether the client wants an error: the prediction misses the TTFT objective."""
        ttft_s = self.slo.ttft_s
        wanted = self.fails_early and not self.has_begun
        return wanted and ttft_s is not None and self.predicted_ttft_s > ttft_s

    @property
    def whole(self) -> ProxyRequest:
        """The request that the client has made: this one, or the one that it is a part of."""
        return self._whole or self

    @property
    def kept(self) -> bool:
        """Whether another replica may continue the request. Its stream releases its last record."""
        return self.on_recorded is not None

    @property
    def has_ended(self) -> bool:
        return self.stage is Stage.ENDED

    @property
    def has_begun(self) -> bool:
        """Whether tokens have come, in this incarnation or an earlier one."""
        return self.first_token_at is not None

    def about(self) -> dict[str, str]:
        """Returns the fields of a log record that is about the request."""
        return log_fields(self.request_id, self.spec.traceparent)

    def submit(self, now: float) -> None:
        """Notes that the request is sent to the scheduler."""
        if self.stage is Stage.PARKED:
            self._note("parked", self.spec.proxy.id, self.waiting_since, now)
        self.stage, self.waiting_since = Stage.SUBMITTED, now
        if not self.has_begun:
            self.submitted_at = now

    @property
    def at_scheduler(self) -> bool:
        """Whether a scheduler has this incarnation, or is to have it as soon as one leads."""
        here = (Stage.MOVING, Stage.PARKED, Stage.ENDED)
        return self.recorded and self.stage not in here

    def reopened(self, now: float) -> OpenRequest:
        """Describes the request to a scheduler that may not know it."""
        self.was_reopened = True
        token_age_s = None
        if self.stage is Stage.STREAMING and self.first_token_at is not None:
            token_age_s = now - self.first_token_at
        return OpenRequest(
            request=self.encoded_spec,
            decode=self.decode,
            age_s=now - self.arrived_at,
            token_age_s=token_age_s,
        )

    def await_scheduler(self, now: float) -> None:
        """Notes that the scheduler is gone: the next one keeps its place, or places it again."""
        self.waiting_since = now
        if self.stage is not Stage.STREAMING:
            self.confirmed = False

    def park(self, now: float) -> None:
        """Notes that the request waits until there is a fleet."""
        self.stage, self.waiting_since = Stage.PARKED, now
        if self.parked_since is None:
            self.parked_since = now

    def queue(self) -> None:
        """Notes that no instance has the request: the scheduler's next message may take long."""
        if self.stage in (Stage.SUBMITTED, Stage.PLACED, Stage.UNPLACED):
            self.stage, self.decode = Stage.QUEUED, None

    def place(self, decode: Incarnation, predicted_ttft_s: float, now: float) -> None:
        """Notes the instance that will stream its tokens."""
        # The prediction begins when the scheduler sends it. The scheduler answers a submission at
        # once: it sent the answer in the middle of the round trip.
        sent = (self.waiting_since + now) / 2.0 if self.stage is Stage.SUBMITTED else now
        self.stage, self.decode = Stage.PLACED, decode
        self.waiting_since = now
        self.predict(sent - self.arrived_at + predicted_ttft_s)
        if not self.has_begun:
            self.placed_at = now

    def predict(self, predicted_ttft_s: float) -> None:
        """Notes when the first token is expected, in seconds since the arrival.

        An incarnation after the first token keeps the earlier prediction.
        """
        if not self.spec.resumed_tokens:
            self.predicted_ttft_s = predicted_ttft_s

    def suspect(self, deaths: Sequence[Incarnation]) -> None:
        """Notes the lost instances at which the request was open, by what the scheduler knows."""
        self.spec = replace(self.spec, deaths=deaths)
        if self.encoded_spec:
            self.encoded_spec = encode_spec(self.spec)

    def move(self, now: float) -> list[ProxyRequest]:
        """Begins the next incarnation, whose prompt ends in the tokens of this incarnation.

        Returns what is to be submitted: the request, or its parts.
        """
        if len(self.choices) == 1 or not self.has_begun:
            self._begin_incarnation(now)
            return [self]
        open_choices = [i for i, one in enumerate(self.choices) if one.finish_reason is None]
        self.parts = [self._part(index) for index in open_choices]
        for part in self.parts:
            part._begin_incarnation(now)
        self.stage, self.moves = Stage.SPLIT, self.moves + 1
        return self.parts

    def _part(self, index: int) -> ProxyRequest:
        """Returns the request of one choice, which has its tokens so far."""
        part = copy(self)
        part._whole, part.sink, part.parts = self, PartSink(self), []
        part.lineage = f"{self.lineage}.c{index}"
        part.choices, part._tokens = [self.choices[index]], [self._tokens[index]]
        part._open_choices = 1
        sampling = replace(self.spec.sampling, n=1, first_choice=index)
        part.spec = replace(self.spec, sampling=sampling)
        return part

    def end_choice(self) -> None:
        """Notes that one of its choices has finished."""
        self._open_choices -= 1
        if self._open_choices == 0:
            self.stage = Stage.ENDED
            self.sink.on_done(self)

    def rename(self) -> None:
        """Gives an incarnation that was not submitted yet the next name: another request has its
        name. After a loss of the store's data there may be two requests of one id.
        """
        self.moves += 1
        self.spec = replace(self.spec, request_id=f"{self.lineage}.{self.moves}")
        self.encoded_spec = b""

    def _begin_incarnation(self, now: float) -> None:
        self.moves += 1
        if self._moved_at is None:
            self._moved_at = now
        tokens = np.array(self._tokens[0], dtype=np.int32)
        if tokens.size:
            self.prompt_ids = np.concatenate([self.prompt_ids, tokens])
            self._tokens = [array("i")]
        e2e_s = self.slo.e2e_s
        left_s = None if e2e_s is None else e2e_s - (now - self.arrived_at)
        rest = continuation(self.spec, f"{self.lineage}.{self.moves}", tokens.size, left_s)
        self.spec = with_blocks(rest, self.prompt_ids)
        self.stage, self.decode = Stage.MOVING, None
        self.encoded_spec, self.recorded = b"", False
        if self.has_begun:
            self.stored = {}
        self._early = {}
        self.confirmed = self.was_reopened = self.begun_again = False
        self.parked_since, self.waiting_since = None, now

    def keep(self, decode: Incarnation, event: TokenEvent) -> None:
        """Keeps an event of an instance at which the request may be placed: tokens and placements
        come on independent streams.
        """
        self._early.setdefault(decode, []).append(event)

    def take_kept(self, decode: Incarnation) -> list[TokenEvent]:
        """Returns the kept events of this instance, in order; forgets all kept events."""
        kept = self._early.get(decode, [])
        self._early = {}
        return kept

    def has_kept(self, decode: Incarnation) -> bool:
        """Whether tokens of this instance are kept."""
        kept = self._early.get(decode, ())
        return any(event.begins or event.token_ids for event in kept)

    def take(self, event: TokenEvent, now: float) -> float | None:
        """Takes one event; returns the gap to the choice's token before, in seconds."""
        begins, reason = self.stage is not Stage.STREAMING, event.finish_reason
        detail = event.detail() if begins or reason or self._detailed else None
        if detail is not None:
            self.note(detail.spans)
            if begins:
                self._begin(detail, now)
        self.last_token_at = self.whole.last_token_at = now
        choice = self.choices[event.choice]
        gap = None if choice.last_token_at is None else now - choice.last_token_at
        choice.last_token_at = now
        if choice.finish_reason is not None:
            return gap  # the engine generated these tokens before it knew of the stop string
        self._tokens[event.choice].extend(event.token_ids)
        stop_id = event.stop_token_id if reason else -1
        if detail is not None and self._detailed:
            piece = choice.feed_piece(event.token_ids, detail.logprobs, reason, stop_id)
            self.sink.on_piece(choice, piece)
        else:
            text = choice.feed(event.token_ids, reason, stop_id)
            if text or choice.finish_reason is not None:
                self.sink.on_text(choice, text)
        if choice.finish_reason is not None:
            self.end_choice()
        return gap

    def note(self, spans: Sequence[EncodedSpan]) -> None:
        """Takes the bars of the waterfall that an event carries."""
        if self._moved_at is not None:
            moved_s = self._moved_at - self.arrived_at
            spans = encode_spans(_after(moved_s, decode_span(one)) for one in spans)
        self.spans.extend(spans)

    def _note(self, name: str, instance_id: str, since: float, now: float) -> None:
        start_s, end_s = since - self.arrived_at, now - self.arrived_at
        self.waits.append(Span(name=name, instance_id=instance_id, start_s=start_s, end_s=end_s))

    def _begin(self, detail: TokenDetail, now: float) -> None:
        """Takes the first token of this incarnation."""
        self.stage = Stage.STREAMING
        if self.adoption is not None:
            self.adoption.take_token(now)
        if self._moved_at is not None:
            self._note("moved", self.decode.id if self.decode else "", self._moved_at, now)
            self._moved_at = None
        if self.has_begun:
            return
        self.first_token_at = now
        fixed = self.fixed_cached_tokens
        self.cached_tokens = detail.cached_tokens if fixed is None else fixed
        self.pooled = detail.pooled
        self.prompt_logprobs = detail.prompt_logprobs
        if self._echo is not None:
            piece = self._echo.piece(detail.prompt_logprobs)
            for choice in self.choices:
                self.sink.echo(choice, piece)


def _after(moved_s: float, span: Span) -> Span:
    """Starts "queued" at the migration: an instance counts it from the arrival."""
    return replace(span, start_s=min(moved_s, span.end_s)) if span.name == "queued" else span
