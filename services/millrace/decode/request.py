"""One request at a decode instance: its state, and what the instance holds for it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from millrace.core.errors import IntegrityError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.kvp_pass import RemoteShard
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.commands import AdmitDecode
from millrace.core.scheduler.reports import RequestFinished, RequestReleased
from millrace.core.span import Span
from millrace.decode.held_pages import HeldPages
from millrace.engine.decode_batch import Sequence
from millrace.engine.sampling.spec import SamplingSpec
from millrace.instance.sampling import sampling_spec
from millrace.instance.spans import RequestTrace
from millrace.telemetry.tracing.stopwatch import Stopwatch
from millrace.telemetry.tracing.tracer import NO_TRACER, Tracer

#: An answer's trace has a moment for every so many tokens, at most so many moments.
MOMENT_TOKENS: Final = 64
MOST_MOMENTS: Final = 128


class DecodeState(Enum):
    """The progress of a request at a decode instance, from its admission to its release."""

    WAITING = "waiting"  # has no pages yet
    RECEIVING = "receiving"  # has pages; its KV arrives (at a mixed instance: is computed)
    STREAMING = "streaming"  # its first tokens are out; KV still arrives
    LANDED = "landed"  # all KV is in its pages; the prompt or shards may be missing
    READY = "ready"  # waits for room in the batch
    RUNNING = "running"  # in the batch
    PAUSED = "paused"  # preempted; its KV is in its pages
    SWAPPING_OUT = "swapping out"  # preempted; its KV is copied to host memory
    SWAPPED = "swapped"  # preempted; its KV is in host memory
    SWAPPING_IN = "swapping in"  # preempted; its KV is copied into pages again
    ENDED_SWAPPING_OUT = "ended while swapping out"
    ENDED_SWAPPING_IN = "ended while swapping in"
    ENDED = "ended"  # the KV in its pages may be cached for other requests
    DISCARDED = "discarded"  # ended; its KV is incomplete, unsound or not in pages


class DecodeEvent(Enum):
    """An event that changes the state of a request at a decode instance."""

    PAGES_RESERVED = "pages reserved"
    FIRST_TOKENS_SENT = "first tokens sent"
    KV_LANDED = "KV landed"
    QUEUED = "queued for the batch"
    JOINED = "joined the batch"
    PAUSED = "paused"
    SWAP_OUT_BEGAN = "swap-out began"
    SWAP_IN_BEGAN = "swap-in began"
    COPIED = "copied"
    ENDED = "ended"
    SPOILED = "spoiled"  # ended by an error in its KV


_S, _E = DecodeState, DecodeEvent

#: Every legal step: a state and an event map to the next state. KV counts as landed only after
#: prefill's last message, which has the first tokens. A copy to or from host memory runs to its
#: end, also after the end of its request.
TRANSITIONS: MappingProxyType[tuple[DecodeState, DecodeEvent], DecodeState] = MappingProxyType(
    {
        (_S.WAITING, _E.PAGES_RESERVED): _S.RECEIVING,
        (_S.RECEIVING, _E.FIRST_TOKENS_SENT): _S.STREAMING,
        (_S.STREAMING, _E.KV_LANDED): _S.LANDED,
        (_S.LANDED, _E.QUEUED): _S.READY,
        (_S.READY, _E.JOINED): _S.RUNNING,
        (_S.READY, _E.PAUSED): _S.PAUSED,
        (_S.RUNNING, _E.PAUSED): _S.PAUSED,
        (_S.PAUSED, _E.JOINED): _S.RUNNING,
        (_S.PAUSED, _E.SWAP_OUT_BEGAN): _S.SWAPPING_OUT,
        (_S.SWAPPING_OUT, _E.COPIED): _S.SWAPPED,
        (_S.SWAPPED, _E.SWAP_IN_BEGAN): _S.SWAPPING_IN,
        (_S.SWAPPING_IN, _E.COPIED): _S.PAUSED,
        (_S.ENDED_SWAPPING_OUT, _E.COPIED): _S.DISCARDED,
        (_S.ENDED_SWAPPING_IN, _E.COPIED): _S.ENDED,
        **{
            (state, _E.ENDED): _S.DISCARDED
            for state in (_S.WAITING, _S.RECEIVING, _S.STREAMING, _S.SWAPPED)
        },
        **{(state, _E.ENDED): _S.ENDED for state in (_S.LANDED, _S.READY, _S.RUNNING, _S.PAUSED)},
        (_S.SWAPPING_OUT, _E.ENDED): _S.ENDED_SWAPPING_OUT,
        (_S.SWAPPING_IN, _E.ENDED): _S.ENDED_SWAPPING_IN,
        (_S.RUNNING, _E.SPOILED): _S.DISCARDED,
        (_S.PAUSED, _E.SPOILED): _S.DISCARDED,
        (_S.SWAPPING_OUT, _E.SPOILED): _S.ENDED_SWAPPING_OUT,
    }
)

_COPYING = (_S.SWAPPING_OUT, _S.SWAPPING_IN, _S.ENDED_SWAPPING_OUT, _S.ENDED_SWAPPING_IN)
_ENDS = (_S.ENDED, _S.DISCARDED, _S.ENDED_SWAPPING_OUT, _S.ENDED_SWAPPING_IN)
_WITHOUT_TOKENS = (_S.WAITING, _S.RECEIVING)
_NOT_QUEUED = (*_WITHOUT_TOKENS, _S.STREAMING, _S.LANDED, _S.DISCARDED)
_KV_IN_PAGES = (_S.LANDED, _S.READY, _S.RUNNING, _S.PAUSED, _S.ENDED)


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """The instance's record of a request, from its admission to its release."""

    spec: RequestSpec
    sampling: SamplingSpec
    trace: RequestTrace
    proxy: Incarnation
    attempt: int = 1
    expected_tokens: float = 1.0  # of a choice's answer
    state: DecodeState = DecodeState.WAITING  # changed by `advance` only
    pages: HeldPages = field(default_factory=HeldPages)
    first_token_ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    pace_s: float = inf  # with a first token: the mean time between tokens that objectives ask for
    transfer: Span | None = None  # in flight, as the sender began it
    prompt_ids: npt.NDArray[np.int32] | None = None
    prompt_tail: npt.NDArray[np.int32] | None = None  # after the last whole block
    cached_tokens: int = 0  # first tokens whose KV was cached at admission
    answer_ids: array[int] = field(default_factory=lambda: array("i"))  # of choice 0
    num_shards: int = 0  # at KVP workers, which hold the KV after its own pages
    shards: tuple[RemoteShard, ...] = ()  # set when the KV of all has landed
    open_choices: set[int] = field(default_factory=set)
    _emitted: dict[int, int] = field(default_factory=dict)  # tokens by choice
    generated_tokens: int = 0
    finish_reason: str = ""
    first_step_s: float | None = None
    _steps_s: float = 0.0  # when its first step began; 0: none has ended
    _moment_at: float = inf  # generated tokens at which the trace has its next moment
    _moments: list[tuple[str, float, dict[str, int]]] = field(default_factory=list)
    away_since_s: float | None = None  # ready or preempted: out of the batch since then

    def emitted(self, choice: int, tokens: int) -> int:
        """Counts emitted tokens of a choice; returns the number of its tokens before them, with the
        tokens of earlier submissions of the request."""
        before = self._emitted.get(choice, self.spec.resumed_tokens)
        self._emitted[choice] = before + tokens
        return before

    @staticmethod
    def of(admit: AdmitDecode, instance_id: str, tracer: Tracer = NO_TRACER) -> DecodeRequest:
        spec = admit.request
        trace = RequestTrace(spec, instance_id, tracer, admit.attempt)
        return DecodeRequest(
            spec=spec,
            sampling=sampling_spec(spec),
            trace=trace,
            proxy=spec.proxy,
            attempt=admit.attempt,
            expected_tokens=admit.expected_tokens,
            _moment_at=MOMENT_TOKENS if trace.records else inf,
        )

    @property
    def clock(self) -> Stopwatch:
        return self.trace.clock

    @property
    def admitted_s(self) -> float:
        """Returns when the instance got the request, in seconds since its arrival."""
        return self.trace.began_s

    @property
    def id(self) -> str:
        return self.spec.request_id

    @property
    def prompt_tokens(self) -> int:
        return self.spec.prompt_tokens

    @property
    def context_tokens(self) -> int:
        """Returns the tokens whose KV a step of the open choices reads."""
        return self.prompt_tokens * len(self.open_choices) + self.generated_tokens

    @property
    def ended(self) -> bool:
        """Whether the request has ended; its memory may still be held."""
        return self.state in _ENDS

    @property
    def streams(self) -> bool:
        """Whether tokens of the live request are out: it can't be generated again."""
        return self.state not in _WITHOUT_TOKENS and self.state not in _ENDS

    @property
    def may_continue(self) -> bool:
        """Whether another attempt may continue after the landed tokens.

        A request for prompt log-probabilities begins again: it needs those of the whole prompt.
        """
        return self.state in _WITHOUT_TOKENS and not self.spec.needs_whole_prompt

    @property
    def prefill_only(self) -> bool:
        """Whether it generates no token."""
        return self.sampling.max_tokens == 0

    @property
    def joined(self) -> bool:
        """Whether the request came to the batch: it waits for room, runs, is preempted or ended."""
        return self.state not in _NOT_QUEUED

    @property
    def has_kv(self) -> bool:
        """Whether its pages have the sound KV of the whole prompt (of the KV owner's shard)."""
        return self.state in _KV_IN_PAGES

    @property
    def is_copying(self) -> bool:
        """Whether its KV is being copied to or from host memory."""
        return self.state in _COPYING

    @property
    def is_spread(self) -> bool:
        """Whether KVP workers hold a part of its KV, or will hold it."""
        return self.num_shards > 0

    @property
    def has_shards(self) -> bool:
        """Whether KVP workers hold all shards that the request needs there."""
        return len(self.shards) == self.num_shards

    def advance(self, event: DecodeEvent) -> None:
        """Moves to the state after `event`. Raises IntegrityError if `TRANSITIONS` has none."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise IntegrityError(
                f"request {self.id}: event {event.value!r} in state {self.state.value!r}"
            )
        self.state = after

    def hold(self, pages: HeldPages) -> None:
        """Notes the pages that were reserved for its admission."""
        self.pages = pages
        self.advance(DecodeEvent.PAGES_RESERVED)

    def start_choices(self, first_token_ids: Many[int]) -> None:
        """Notes the first tokens, one per choice, at the time when they are sent; none if the
        request is prefill only.
        """
        self.advance(DecodeEvent.FIRST_TOKENS_SENT)
        self.first_token_ids = list(first_token_ids)
        self.first_token_s = self.clock.now_s()
        self.pace_s = self.spec.slo.pace_s(self.first_token_s, self.expected_tokens)
        self.open_choices = set(range(self.sampling.n))

    def last_report(self) -> RequestFinished | RequestReleased:
        """The report to the scheduler, after the instance has released everything."""
        if not self.finish_reason:
            return RequestReleased(request_id=self.id, attempt=self.attempt)
        return RequestFinished(
            request_id=self.id,
            reason=self.finish_reason,
            generated_tokens=self.generated_tokens,
        )

    @property
    def can_join(self) -> bool:
        """Whether decode has all it needs: first token, KV, and the prompt for penalties."""
        has_prompt = self.prompt_ids is not None or not self.sampling.needs_prompt_ids
        return self.state is DecodeState.LANDED and self.has_shards and has_prompt

    def stepped(self, batch: int) -> None:
        """Notes that a step gave the request a token; after the first step, adds its span."""
        if self.first_step_s is not None:
            self.trace.add("first_decode_step", self.first_step_s, self.clock.now_s(), batch=batch)
            self._steps_s = self._steps_s or self.first_step_s
            self.first_step_s = None
        if self.generated_tokens >= self._moment_at:
            attributes = {"millrace.tokens": self.generated_tokens, "millrace.batch": batch}
            self._moments.append(("tokens", self.clock.now_s(), attributes))
            full = len(self._moments) == MOST_MOMENTS
            self._moment_at = inf if full else self._moment_at + MOMENT_TOKENS

    def end_trace(self, error: str) -> None:
        """Records the spans of its steps and of the instance; `error` is empty if none ended it."""
        if self._steps_s:
            self.trace.trace_steps(self._steps_s, self.clock.now_s(), self._moments)
        self.trace.end(
            "decode",
            error,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            end=self.finish_reason or ("failed" if error else "cancelled"),
        )

    def sequences(self) -> Iterator[Sequence]:
        """Yields the open choices, each with its pages. The caller copies the prompt's partly
        filled page."""
        for choice in sorted(self.open_choices):
            yield Sequence(
                request_id=self.id,
                choice=choice,
                pages=self.pages.of_choice(choice),
                prompt_tokens=self.prompt_tokens,
                first_token_id=self.first_token_ids[choice],
                spec=self.sampling,
                prompt_ids=self.prompt_ids,
                shards=self.shards,
            )
