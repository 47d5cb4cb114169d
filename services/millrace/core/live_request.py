"""A request while it is served: its specification and its progress.

`LiveRequest` is read everywhere and written in this module only: each method below notes one thing
that happened to the request, and other modules call it. The scheduler keeps one object per request
that has not ended; an instance that packs its own batches keeps one per prompt.
"""

from __future__ import annotations

import math
import sys
from typing import Final

from millrace.core.request import (
    MIN_KEPT_TOKENS,
    TRANSITIONS,
    Chunk,
    IllegalTransition,
    Request,
    RequestState,
    Shard,
)
from millrace.core.suspicion import Suspicion
from millrace.core.waits import COMPUTING, TURN, Waits

#: States whose request has its first token.
_HAS_TOKEN = frozenset({RequestState.TRANSFERRING, RequestState.DECODING, RequestState.FINISHED})


class LiveRequest:
    """One request from its submission to its end.

    The fields of `spec` are repeated here, since every decision reads them.
    """

    __slots__ = (
        "advanced_tokens",
        "arrival_s",
        "attempt",
        "attempts",
        "begun",
        "choices",
        "chunks",
        "chunks_done",
        "computed_alone_s",
        "counts",
        "deadline_s",
        "decode_id",
        "dispatched_s",
        "earlier_attempts",
        "executed_s",
        "expected_tokens",
        "first_token_s",
        "id",
        "in_time",
        "kept_tokens",
        "landed_tokens",
        "max_new_tokens",
        "order",
        "pace_s",
        "predicted_prefill_s",
        "predicted_work_s",
        "prefill_only",
        "prefix_hashes",
        "priority",
        "prompt_tokens",
        "proxy_id",
        "resumable",
        "running_since_s",
        "shards",
        "slo",
        "spec",
        "state",
        "suspicion",
        "tenant",
        "token_out_s",
        "waits",
    )

    def __init__(self, spec: Request) -> None:
        self.spec: Final = spec
        self.id: Final = spec.id
        self.proxy_id = spec.proxy_id
        self.prompt_tokens: Final = spec.prompt_tokens
        self.max_new_tokens: Final = spec.max_new_tokens
        self.choices: Final = spec.choices
        self.slo: Final = spec.slo
        self.tenant: Final = spec.tenant
        self.priority: Final = spec.priority
        self.arrival_s: Final = spec.arrival_s
        self.prefix_hashes: Final = spec.prefix_hashes
        self.resumable: Final = spec.resumable
        self.prefill_only: Final = spec.prefill_only

        self.waits: Final = Waits(spec.arrival_s)
        self.suspicion: Final = Suspicion()
        self.state = RequestState.QUEUED
        self.order = sys.maxsize  # of acceptance, last until then; tells equal keys apart
        self.expected_tokens = 1.0  # of a choice's answer
        #: The longest mean time between tokens that keeps its TBT and end-to-end objectives.
        self.pace_s = self.slo.tbt_s or math.inf
        self.deadline_s = math.inf  # of the first token, by the same clock as `arrival_s`
        self.decode_id: str | None = None
        self.shards: tuple[Shard, ...] = ()  # of its KV, the first at `decode_id`; none: all there
        self.chunks: tuple[Chunk, ...] = ()
        self.chunks_done = 0
        #: Number of the last attempt that decode heard of; numbers that other schedulers may use.
        self.attempt = self.earlier_attempts = 0
        self.attempts = 0  # sent to prefill, without those that do not count
        self.counts = False  # the last attempt is among them
        self.begun = False  # a mixed instance has begun to compute this attempt
        #: First tokens whose KV decode keeps for this attempt: the chunks begin there.
        self.kept_tokens = 0
        self.landed_tokens = 0  # first tokens whose KV decode has, by its last report
        self.advanced_tokens = 0  # computed first tokens of this attempt, by its instance's report
        self.dispatched_s: float | None = None
        self.first_token_s: float | None = None
        self.in_time: bool | None = None  # it met all its objectives, as soon as that is known
        self.token_out_s: float | None = None  # when decode sent the first token to the proxy
        #: Seconds of its prefill, if that was one span that waited for no other task.
        self.computed_alone_s: float | None = None
        #: Predicted seconds of prefill by its plan (before it has a plan: alone on an idle pool).
        self.predicted_prefill_s = 0.0
        #: The same in seconds times instances (before it has a plan: on the smallest group).
        self.predicted_work_s = 0.0
        self.executed_s = 0.0  # predicted seconds of prefill that its ended spans have done
        self.running_since_s: float | None = None  # since when a chunk of it has been computing

    def __repr__(self) -> str:
        return f"LiveRequest({self.id!r}, {self.state.value})"

    # ---- what other modules read

    @property
    def allowed_ttft_s(self) -> float | None:
        """Returns the seconds from its arrival to the deadline that its objectives set for the
        first token; None where no objective does.
        """
        slo = self.slo
        return slo.ttft_s if slo.e2e_s is None else self.deadline_s - self.arrival_s

    @property
    def continues(self) -> bool:
        """Returns whether decode keeps the KV of earlier attempts (not of its prefix cache)."""
        return self.kept_tokens > 0 and self.attempt > 1

    @property
    def got_further(self) -> bool:
        """Returns whether the attempt leaves decode more of the prompt than it found there."""
        keeps = self.resumable and not self.shards and self.state is RequestState.PREFILLING
        return keeps and self.advances_to(self.landed_tokens)

    def advances_to(self, kept_tokens: int) -> bool:
        """Returns whether `kept_tokens` are enough more than the attempt found."""
        return kept_tokens >= self.kept_tokens + MIN_KEPT_TOKENS

    @property
    def kv_instance_ids(self) -> tuple[str, ...]:
        """The instances that keep its KV to its end: the KV owner first, then the KVP workers."""
        if self.shards:
            return tuple(shard.worker_id for shard in self.shards)
        return () if self.decode_id is None else (self.decode_id,)

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """The instances of its present attempt: the members of its chunks, then where its KV is."""
        return self._instances_of(self.chunks)

    @property
    def reached_instance_ids(self) -> tuple[str, ...]:
        """The same without the members that a chunk after the running one adds."""
        return self._instances_of(self.chunks[: self.chunks_done + 1])

    def _instances_of(self, chunks: tuple[Chunk, ...]) -> tuple[str, ...]:
        members = (name for chunk in chunks for name in chunk.instance_ids)
        return tuple(dict.fromkeys((*members, *self.kv_instance_ids)))

    def remaining_s(self, now_s: float) -> float:
        """The predicted seconds of prefill still to compute: executed work counts as done."""
        left_s = self.predicted_prefill_s - self.executed_s
        if self.running_since_s is not None:
            left_s -= now_s - self.running_since_s
        return left_s if left_s > 0.0 else 0.0

    def remaining_work_s(self, now_s: float) -> float:
        """The predicted seconds of prefill still to compute, times the instances of the group."""
        return self.work_of(self.remaining_s(now_s))

    @property
    def has_begun(self) -> bool:
        """Returns whether an instance has begun to compute its present plan."""
        ran = self.running_since_s is not None or self.executed_s > 0.0 or self.chunks_done > 0
        return ran or self.begun

    def work_of(self, left_s: float) -> float:
        """Returns `left_s` of its predicted seconds, times the instances of the group."""
        if self.predicted_prefill_s <= 0.0:
            return self.predicted_work_s
        return self.predicted_work_s * left_s / self.predicted_prefill_s

    # ---- acceptance, prediction, state

    def expect(self, answer_tokens: float) -> None:
        """Notes how many tokens a choice of its answer is expected to have."""
        self.expected_tokens = answer_tokens

    def expect_first_token(self, at_s: float) -> None:
        """Notes when the first token comes, or is predicted to come: what is then left of the
        end-to-end objective sets the pace of the answer. An objective that is over sets none.
        """
        self.pace_s = self.slo.pace_s(at_s - self.arrival_s, self.expected_tokens)

    def due_by(self, deadline_s: float) -> None:
        """Notes the deadline of its first token."""
        self.deadline_s = deadline_s

    def accept(self, order: int) -> None:
        """Notes that the request may wait in the queue."""
        self.order = order

    def judge(self, in_time: bool) -> None:
        """Notes whether it met its objectives; False as soon as its deadline has passed."""
        self.in_time = in_time

    def predict(self, prefill_s: float, work_s: float) -> None:
        """Notes the predicted seconds of its prefill, and the same times instances."""
        self.predicted_prefill_s = prefill_s
        self.predicted_work_s = work_s

    def advance(self, state: RequestState, now_s: float) -> None:
        """Moves to `state`. The first state that has a token gives the time of the first token.

        Decode's report may overtake prefill's: either of them counts. Raises IllegalTransition when
        `TRANSITIONS` does not allow the step.
        """
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"request {self.id}: {self.state.value} -> {state.value}")
        self.state = state
        if self.first_token_s is None and state in _HAS_TOKEN:
            self.first_token_s = now_s
            self.waits.end(now_s)

    # ---- placement and attempts

    def place(
        self, decode_id: str | None, shards: tuple[Shard, ...] = (), kept_tokens: int = 0
    ) -> None:
        """Notes that its first or next attempt has memory for its KV, with `kept_tokens` there
        already. Without a decode instance it is prefill only, and no KV is kept.
        """
        self.decode_id = decode_id
        self.shards = shards
        self.kept_tokens = self.landed_tokens = kept_tokens
        self._count_attempt()

    def adopt(
        self, decode_id: str | None, shards: tuple[Shard, ...], *, attempt: int, kept_tokens: int
    ) -> None:
        """Notes the placement that another scheduler has given it, after `attempt` attempts."""
        self.place(decode_id, shards, kept_tokens)
        self.attempt = attempt

    def count_attempts(self, attempts: int) -> None:
        """Notes that another scheduler may have made so many attempts: the next one has a number
        of its own."""
        self.attempt = self.earlier_attempts = attempts

    def _count_attempt(self) -> None:
        self.attempt = max(self.attempt, self.earlier_attempts) + 1

    def has_token_since(self, first_token_s: float) -> None:
        """Notes that its client has had tokens since `first_token_s`, from another scheduler."""
        self.first_token_s = first_token_s
        self.waits.end(first_token_s)

    def reown(self, proxy_id: str) -> None:
        """Notes the connection of the proxy that its messages go to from now on."""
        self.proxy_id = proxy_id

    def send(self, chunks: tuple[Chunk, ...], now_s: float) -> None:
        """Notes that prefill instances have its chunks."""
        self.chunks = chunks
        self.attempts += 1
        self.counts = True
        self.dispatched_s = now_s
        self.token_out_s = self.computed_alone_s = None  # of an earlier attempt
        self.waits.enter(TURN, now_s)

    def forgive_attempt(self) -> None:
        """Notes that the last attempt does not count: it left decode more than it found, or its
        instance was lost.
        """
        self.attempts -= self.counts
        self.counts = False

    def forgive_broken(self) -> None:
        """Notes that an attempt that was given up does not count: an instance of it was lost."""
        self.suspicion.broken_at = frozenset()
        self.attempts -= 1

    def resume(self, kept_tokens: int, now_s: float) -> None:
        """Notes that it waits for another attempt after the first tokens, whose KV decode keeps."""
        self._forget_plan(now_s)
        self.kept_tokens = self.landed_tokens = kept_tokens
        self._count_attempt()

    def unplace(self, now_s: float) -> None:
        """Notes that it waits for another attempt from its first token on, at any instance."""
        self._forget_plan(now_s)
        self.decode_id = None
        self.shards = ()
        self.kept_tokens = self.landed_tokens = 0

    def _forget_plan(self, now_s: float) -> None:
        self.chunks = ()
        self.chunks_done = self.advanced_tokens = 0
        self.begun = False
        self.dispatched_s = None
        self.suspend(0.0)
        if self.state is not RequestState.QUEUED:
            self.advance(RequestState.QUEUED, now_s)

    # ---- prefill

    def begin(self) -> None:
        """Notes that a mixed instance computes the first tokens of this attempt."""
        self.begun = True

    def advance_prompt(self, tokens: int) -> None:
        """Notes that its first `tokens` tokens are computed in this attempt."""
        self.advanced_tokens = max(self.advanced_tokens, min(tokens, self.prompt_tokens))

    def start_chunk(self, now_s: float) -> None:
        """Notes that a chunk of it computes."""
        if self.running_since_s is None:
            self.running_since_s = now_s
            self.waits.enter(COMPUTING, now_s)

    def suspend(self, executed_s: float) -> None:
        """Notes that no chunk of it computes now; `executed_s` of its predicted seconds are
        done."""
        self.executed_s = executed_s
        self.running_since_s = None

    def finish_chunk(self, index: int, executed_s: float) -> None:
        """Notes that the chunk is computed."""
        self.chunks_done = index + 1
        self.suspend(executed_s)

    def take_over(self, head: LiveRequest) -> None:
        """Notes that it is the new head of a batch, and counts the batch's work as the old head
        did.
        """
        self.predict(head.predicted_prefill_s, head.predicted_work_s)
        self.executed_s = head.executed_s
        self.running_since_s = head.running_since_s

    def computed_in_one_span(self, compute_s: float) -> None:
        """Notes that all of its prefill was one span that waited for no other task."""
        self.computed_alone_s = compute_s

    # ---- KV and decode

    def land(self, tokens: int) -> None:
        """Notes that decode has the KV of its first `tokens` tokens."""
        self.landed_tokens = tokens

    def start_decode(self, token_out_s: float) -> None:
        """Notes that all of its KV has landed, and that the proxy got the first token at
        `token_out_s`.
        """
        self.landed_tokens = self.prompt_tokens
        self.token_out_s = token_out_s
        self.expect_first_token(token_out_s)

    def take_overhead_s(self) -> float | None:
        """Returns the seconds from dispatch to the first token without computing; once per attempt.

        None until both prefill and decode have reported the first token.
        """
        sent_s, out_s, took_s = self.dispatched_s, self.token_out_s, self.computed_alone_s
        if sent_s is None or out_s is None or took_s is None:
            return None
        self.computed_alone_s = None
        return out_s - sent_s - took_s
