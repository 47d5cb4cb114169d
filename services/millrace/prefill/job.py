"""The state of one request at a prefill instance: one attempt, over all its chunks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from millrace.core.errors import IntegrityError, MillraceError
from millrace.core.instance.group import PromptLogprobsRun
from millrace.core.instance.prompt_steps import PromptSteps
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import (
    RING_BUFFERS,
    ChunkShares,
    GroupPass,
    Layout,
    Run,
    layout,
    pass_tokens,
)
from millrace.core.request import Chunk
from millrace.core.scheduler.commands import RunPrefill
from millrace.core.token_events import FirstToken
from millrace.engine.sampling.spec import SamplingSpec
from millrace.instance.sampling import sampling_spec
from millrace.instance.spans import RequestTrace
from millrace.prefill.hidden_pool import HiddenPool
from millrace.prefill.metrics import PrefillMetrics
from millrace.prefill.states import TRANSITIONS, PrefillEvent, PrefillState
from millrace.telemetry.tracing.tracer import NO_TRACER, Tracer
from millrace.transfer.push.control import Sending
from millrace.transfer.ring.manager import GroupLink

_NO_IDS: Final = torch.empty(0, dtype=torch.int64)


class Cancelled(Exception):
    """Raised in a cancelled job, whose result is no longer wanted; says why."""


@dataclass(slots=True, eq=False)
class PrefillJob:
    """The instance's record of a request, from the command to the release.

    The preparation sets ``layout`` if the job `is_shared`; ``prompt_ids``, int64 [prompt_tokens] on
    the CPU, of which a group's member has only the ids of its shards and the id after each shard;
    and ``passes`` (`cut`). ``link`` to the other members is set when all have joined.

    The compute thread sets ``first_tokens`` at the request's leader, unless the request is prefill
    only, and ``prompt_logprobs``, those of the tokens that this instance computed, if requested, in
    any order. It adds the hidden states that are wanted to ``hidden_pool``. At the end it calls
    ``done`` with the error or None.

    ``failure``, from the moment when the job is cancelled or fails, says why its result is no
    longer wanted; the compute thread reads it at every operator.
    """

    command: RunPrefill
    chunks: tuple[Chunk, ...]
    instance_id: str
    trace: RequestTrace
    sampling: SamplingSpec
    hidden_pool: HiddenPool
    layout: Layout | None = None
    prompt_ids: torch.Tensor = _NO_IDS
    #: Of each chunk; none where all its tokens are cached.
    passes: Sequence[Sequence[GroupPass]] = ()
    pages: list[int] = field(default_factory=list)
    cached_tokens: int = 0  # first tokens whose KV was in the prefix cache
    buffers: list[int] = field(default_factory=list)  # pages lent to the ring
    session: Sending | None = None
    link: GroupLink | None = None
    met_s: float = 0.0  # when it was linked to the other members
    state: PrefillState = PrefillState.PREPARING
    failure: Cancelled | MillraceError | None = None
    first_tokens: tuple[FirstToken, ...] = ()
    prompt_logprobs: list[PromptLogprobsRun] = field(default_factory=list)
    done: Callable[[Exception | None], object] = lambda error: None
    steps: PromptSteps = field(default_factory=PromptSteps)
    _pass_s: float = 0.0  # when the current span of compute began
    _suspended_s: float = 0.0  # when it was suspended last
    _advancing: threading.Lock = field(default_factory=threading.Lock)
    _waiter: asyncio.Task[None] | None = None

    @staticmethod
    def of(command: RunPrefill, instance_id: str, tracer: Tracer = NO_TRACER) -> PrefillJob:
        chunks = tuple(
            chunk if chunk.instance_ids else replace(chunk, instance_ids=(instance_id,))
            for chunk in command.chunks
        )
        return PrefillJob(
            command=command,
            chunks=chunks,
            instance_id=instance_id,
            trace=RequestTrace(command.request, instance_id, tracer, command.attempt),
            sampling=sampling_spec(command.request),
            hidden_pool=HiddenPool(command.request.pooling),
        )

    @property
    def request_id(self) -> str:
        return self.command.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return self.command.request.prompt_tokens

    @property
    def attempt(self) -> int:
        return self.command.attempt

    @property
    def members(self) -> tuple[str, ...]:
        """Lists the instances that compute the prompt, the leader first."""
        return self.chunks[-1].instance_ids

    @property
    def leads(self) -> bool:
        """Whether this instance leads and reports for the group: it computes the last token."""
        return self.members[0] == self.instance_id

    @property
    def prefill_only(self) -> bool:
        """Whether its KV goes nowhere, and the leader sends the result to the proxy."""
        return self.command.decode is None

    @property
    def tells_passes(self) -> bool:
        """Whether it reports how far the prompt is: no decode instance has all of its KV."""
        return self.leads and (self.prefill_only or len(self.command.shards) > 1)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the hidden states of all its tokens are needed."""
        return self.command.request.needs_whole_prompt

    def wants_hidden(self, one: GroupPass) -> bool:
        """Returns whether this instance's hidden states of a pass are needed."""
        return self.needs_whole_prompt or self.hidden_pool.wants(has_last=self._has_last(one))

    def wants_logits(self, one: GroupPass) -> bool:
        """Returns whether the first token is sampled after the pass, at this instance."""
        return not self.prefill_only and self._has_last(one)

    def add_hidden(self, one: GroupPass, hidden: torch.Tensor) -> None:
        """Adds this instance's hidden states of a pass, [L, hidden_size], to the pool."""
        self.hidden_pool.add(hidden, has_last=self._has_last(one))

    def _has_last(self, one: GroupPass) -> bool:
        """Whether this instance computes the prompt's last token in the pass: its leader does."""
        return self.is_last(one) and self.leads

    @property
    def is_shared(self) -> bool:
        """Whether other instances compute the prompt, too, or decode holds kept tokens of it."""
        return len(self.members) > 1 or self.chunks[0].start_token > 0

    def lay_out(self, page_tokens: int, max_chunk_tokens: int) -> None:
        """Computes `layout`, which takes a tenth of a second for a million tokens.

        Raises ValueError for impossible chunks.
        """
        self.layout = layout(self.chunks, page_tokens, max_chunk_tokens)

    def pages_needed(self, kv: KvLayout) -> tuple[int, int]:
        """Counts the pages of its share of the prompt, and the pages lent to the ring."""
        if self.layout is None:
            return kv.pages_for(self.prompt_tokens), 0
        buffers = RING_BUFFERS * self.layout.buffer_pages(kv.buffer_layers)
        return self.layout.pages[self.instance_id], buffers

    def runs(self) -> list[Run] | None:
        """Lists the runs of tokens that this instance computes; None: the whole prompt."""
        if self.layout is None:
            return None
        return self.layout.computed(self.instance_id)

    # -- its chunks and passes

    def cut(self, max_chunk_tokens: int) -> None:
        """Cuts the chunks into passes, after `found`.

        Cached tokens are not computed. For the receiver of the KV they are pass 0, and the first
        computed pass is then number 1.
        """
        if self.layout is not None:
            self.passes = [shares.passes for shares in self.layout.chunks]
            return
        start, number = self.cached_tokens, 1 if self.cached_tokens else 0
        passes: list[list[GroupPass]] = [[] for _ in self.chunks]
        for chunk, of_chunk in zip(self.chunks, passes, strict=True):
            left = chunk.start_token + chunk.num_tokens - start
            for tokens in pass_tokens(left, 1, max_chunk_tokens) if left > 0 else ():
                of_chunk.append(GroupPass(number, start, tokens, (), ()))
                start += tokens
                number += 1
        self.passes = passes

    @property
    def first_chunk(self) -> int:
        """Returns the index of the first chunk that this instance computes."""
        if self.layout is not None:
            return self.layout.first_chunk(self.instance_id)
        return next(index for index, passes in enumerate(self.passes) if passes)

    @property
    def num_passes(self) -> int:
        """Returns the number of passes of the whole request."""
        return self.passes[-1][-1].number + 1

    def is_last(self, one: GroupPass) -> bool:
        """Returns whether the pass is the request's last, which samples the first token."""
        return one is self.passes[-1][-1]

    def shares(self, chunk: int) -> ChunkShares | None:
        """Returns the chunk's shares in its group; None when this instance computes it alone from
        pages in token order."""
        if self.layout is None:
            return None
        shares = self.layout.chunks[chunk]
        is_plain = len(shares.group) == 1 and not self.layout.chunks[0].chunk.start_token
        return None if is_plain else shares

    def gives_after(self, chunk: int) -> bool:
        """Returns whether this instance gives KV of the prompt to others before the next chunk."""
        following = self.layout.chunks[chunk + 1 :] if self.layout is not None else ()
        moves = following[0].moves if following else ()
        return any(move.giver == self.instance_id for move in moves)

    # -- its state

    def advance(self, event: PrefillEvent) -> PrefillState:
        """Takes the step of `TRANSITIONS`; returns the state before it. On any thread.

        Raises IntegrityError for an event that the state does not allow.
        """
        with self._advancing:
            before = self.state
            after = TRANSITIONS.get((before, event))
            if after is None:
                raise IntegrityError(
                    f"request {self.request_id}: event {event.value} in state {before.value}"
                )
            self.state = after
        return before

    def cancel(self, reason: str) -> None:
        """Cancels the job: a wait ends at once, a computation within one operator."""
        if self.advance(PrefillEvent.CANCEL) is not PrefillState.CANCELLED:
            self.failure = Cancelled(reason)
            self._interrupt()

    def fail(self, error: MillraceError) -> None:
        """Ends the job as `cancel` does, with an error. The first reason to end a job counts."""
        self.advance(PrefillEvent.FAIL)
        if self.failure is None:
            self.failure = error
            self._interrupt()

    def unwanted(self) -> Exception | None:
        """Returns why the result has no receiver any more; None if it has one."""
        if self.failure is not None:
            return self.failure
        return None if self.session is None else self.session.failure

    def _interrupt(self) -> None:
        if self.link is not None:
            self.link.abort()
        if self._waiter is not None:
            self._waiter.cancel()

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Lets `cancel` and `fail` interrupt the block's waits, in the job's own task.

        Raises the job's failure.
        """
        if self.failure is not None:
            raise self.failure
        task = self._waiter = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if task is None or self.failure is None:
                raise  # the whole process ends
            task.uncancel()
            raise self.failure from None
        finally:
            self._waiter = None

    # -- spans of its time in the execution pool

    def found(self, cached_tokens: int) -> None:
        """Notes that the first `cached_tokens` tokens need no compute."""
        now_s, self.cached_tokens = self.now_s(), cached_tokens
        self.trace.add("cached", now_s, now_s, tokens=cached_tokens)

    def go_on(self, metrics: PrefillMetrics) -> None:
        """Notes that the compute starts, or resumes after a suspension."""
        before, now_s = self.advance(PrefillEvent.START), self.now_s()
        if before is PrefillState.WAITING:
            received_s = self.trace.began_s
            self.trace.queued()
            self.trace.add("waiting", received_s, now_s)
            metrics.wait_s.observe(now_s - received_s, self.trace.exemplar)
        elif before in (PrefillState.PREEMPTED, PrefillState.LATER_STAGES):
            self.trace.add(before.value, self._suspended_s, now_s)
            preempted = before is PrefillState.PREEMPTED
            waited = metrics.suspended_s if preempted else metrics.later_stages_s
            waited.observe(now_s - self._suspended_s, self.trace.exemplar)

    def suspend(self, event: PrefillEvent) -> None:
        """Notes that another task computes until `go_on`. `event`: PREEMPT or HAND_ON."""
        self.advance(event)
        self._suspended_s = self.now_s()

    def begin_pass(self) -> None:
        """Notes that a pass begins, or resumes after a suspension."""
        self._pass_s = self.now_s()

    def end_pass(self, one: GroupPass, **attributes: str | float) -> None:
        """Ends the span of the pass, which has ended or was suspended at a boundary."""
        self.trace.add(
            "chunk",
            self._pass_s,
            self.now_s(),
            bar=f"chunk {one.number}",
            number=one.number,
            tokens=one.num_tokens,
            history=one.start_token,
            **attributes,
        )

    def now_s(self) -> float:
        """Returns the seconds since the request's arrival."""
        return self.trace.clock.now_s()

    def end_trace(self, reason: str) -> None:
        """Records the instance's span; `reason` says why the job failed or was cancelled, if so."""
        error = "" if isinstance(self.failure, Cancelled) else reason
        self.trace.end(
            "prefill",
            error,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            group=", ".join(self.members),
            end=reason or "computed",
        )


def task_name(request_id: str, chunk: int) -> str:
    """Names the pool's task that computes a chunk of a request."""
    return f"{request_id}/{chunk}"


def request_of(task: str) -> str:
    """Returns the request id in the name of a pool's task."""
    return task.rpartition("/")[0]


def task_names(job: PrefillJob) -> list[str]:
    """Lists the names of all tasks of the job at this instance."""
    mine = (chunk.index for chunk in job.chunks if job.instance_id in chunk.instance_ids)
    return [task_name(job.request_id, index) for index in mine]
