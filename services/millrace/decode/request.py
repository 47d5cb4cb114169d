"""The state of one request at a decode instance."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from millrace.core.kv.kvp_pass import RemoteShard
from millrace.core.kv.transfer import Incarnation
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.reports import RequestFinished, RequestReleased
from millrace.core.span import Span
from millrace.decode.held_pages import HeldPages
from millrace.engine.decode_batch import Sequence
from millrace.engine.sampling.spec import SamplingSpec
from millrace.instance.sampling import sampling_spec
from millrace.instance.spans import Stopwatch, span


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """The instance's record of a request, from its admission to its release."""

    spec: RequestSpec
    sampling: SamplingSpec
    clock: Stopwatch
    proxy: Incarnation
    pages: HeldPages
    admitted_s: float
    attempt: int = 1
    first_token_ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    transfer: Span | None = None  # in flight, as the sender began it
    spans: list[Span] = field(default_factory=list)
    prompt_ids: npt.NDArray[np.int32] | None = None
    prompt_tail: npt.NDArray[np.int32] | None = None  # after the last whole block
    cached_tokens: int = 0  # first tokens whose KV was cached at admission
    answer_ids: array[int] = field(default_factory=lambda: array("i"))  # of choice 0
    is_sound: bool = True  # its KV may be cached for other requests
    is_spread: bool = False  # KVP workers hold the KV after its own pages
    shards: tuple[RemoteShard, ...] = ()  # set when the KV of all has landed
    landed: bool = False
    joined: bool = False
    ended: bool = False
    open_choices: set[int] = field(default_factory=set)
    generated_tokens: int = 0
    finish_reason: str = ""
    first_step_s: float | None = None
    away_since_s: float | None = None  # ready or preempted: out of the batch since then

    @staticmethod
    def of(spec: RequestSpec, pages: HeldPages, attempt: int = 1) -> DecodeRequest:
        clock = Stopwatch(spec.arrival_unix_s)
        return DecodeRequest(
            spec=spec,
            sampling=sampling_spec(spec),
            clock=clock,
            proxy=spec.proxy,
            pages=pages,
            admitted_s=clock.now_s(),
            attempt=attempt,
        )

    @property
    def id(self) -> str:
        return self.spec.request_id

    @property
    def prompt_tokens(self) -> int:
        return self.spec.prompt_tokens

    @property
    def streams(self) -> bool:
        """Whether tokens may have been sent: the request can't be generated again."""
        return bool(self.first_token_ids)

    @property
    def may_go_on(self) -> bool:
        """Whether another attempt may continue after the landed tokens.

        A request for prompt log-probabilities begins again: it needs those of the whole prompt.
        """
        return not self.streams and self.sampling.prompt_logprobs < 0

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
        """Whether decode has all it needs: the KV, the first token, the prompt for penalties."""
        has_prompt = self.prompt_ids is not None or not self.sampling.needs_prompt_ids
        has_kv = self.landed and (bool(self.shards) or not self.is_spread)
        return has_kv and self.streams and has_prompt and not self.ended

    def stepped(self, instance_id: str, batch: int) -> None:
        """Notes that a step gave the request a token; after the first step, adds its span."""
        if self.first_step_s is not None:
            now_s = self.clock.now_s()
            self.spans.append(
                span("first_decode_step", instance_id, self.first_step_s, now_s, batch=batch)
            )
            self.first_step_s = None

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
