"""The state of one request at a prefill instance."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from millrace.core.errors import IntegrityError, MillraceError
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import RING_BUFFERS, Layout, Run, layout
from millrace.core.request import Chunk
from millrace.core.scheduler.commands import RunPrefill
from millrace.core.span import Span
from millrace.engine.sampling.spec import SamplingSpec
from millrace.instance.sampling import sampling_spec
from millrace.instance.spans import Stopwatch, span
from millrace.prefill.metrics import PrefillMetrics
from millrace.prefill.states import TRANSITIONS, PrefillEvent, PrefillState
from millrace.transfer.push.control import Sending
from millrace.transfer.ring.manager import GroupLink


class Cancelled(Exception):
    """Raised in a cancelled job, whose result is no longer wanted; says why."""


@dataclass(slots=True, eq=False)
class PrefillJob:
    """The instance's record of a request, from the command to the release.

    ``layout`` is set by the preparation if the job `is_shared`; ``link`` to the other members is
    set when all have joined. ``failure``, from the moment when the job is cancelled or fails, says
    why its result is no longer wanted; the compute thread reads it at every operator.
    """

    command: RunPrefill
    chunks: tuple[Chunk, ...]
    instance_id: str
    clock: Stopwatch
    sampling: SamplingSpec
    received_s: float
    layout: Layout | None = None
    pages: list[int] = field(default_factory=list)
    cached_tokens: int = 0  # first tokens whose KV was in the prefix cache
    buffers: list[int] = field(default_factory=list)  # pages lent to the ring
    session: Sending | None = None
    link: GroupLink | None = None
    state: PrefillState = PrefillState.PREPARING
    failure: Cancelled | MillraceError | None = None
    spans: list[Span] = field(default_factory=list)
    _part_s: float = 0.0  # when the current span of compute began
    _suspended_s: float = 0.0  # when it was suspended last
    _advancing: threading.Lock = field(default_factory=threading.Lock)
    _waiter: asyncio.Task[None] | None = None

    @staticmethod
    def of(command: RunPrefill, instance_id: str) -> PrefillJob:
        clock = Stopwatch(command.request.arrival_unix_s)
        chunks = tuple(
            chunk if chunk.instance_ids else replace(chunk, instance_ids=(instance_id,))
            for chunk in command.chunks
        )
        return PrefillJob(
            command=command,
            chunks=chunks,
            instance_id=instance_id,
            clock=clock,
            sampling=sampling_spec(command.request),
            received_s=clock.now_s(),
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
        buffers = RING_BUFFERS * self.layout.buffer_pages(kv.num_layers)
        return self.layout.pages[self.instance_id], buffers

    def runs(self) -> list[Run] | None:
        """Lists the runs of tokens that this instance computes; None: the whole prompt."""
        if self.layout is None:
            return None
        return self.layout.computed(self.instance_id)

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
        now_s, self.cached_tokens = self.clock.now_s(), cached_tokens
        self.spans.append(span("cached", self.instance_id, now_s, now_s, tokens=cached_tokens))

    def go_on(self, metrics: PrefillMetrics) -> None:
        """Notes that the compute starts, or resumes after a suspension."""
        before, now_s = self.advance(PrefillEvent.START), self.clock.now_s()
        if before is PrefillState.WAITING:
            self.spans.append(span("queued", "scheduler", 0.0, self.received_s))
            self.spans.append(span("waiting", self.instance_id, self.received_s, now_s))
            metrics.wait_s.observe(now_s - self.received_s)
        elif before in (PrefillState.PREEMPTED, PrefillState.LATER_STAGES):
            self.spans.append(span(before.value, self.instance_id, self._suspended_s, now_s))
            preempted = before is PrefillState.PREEMPTED
            waited = metrics.suspended_s if preempted else metrics.later_stages_s
            waited.observe(now_s - self._suspended_s)

    def suspend(self, event: PrefillEvent) -> None:
        """Notes that another task computes until `go_on`. `event`: PREEMPT or HAND_ON."""
        self.advance(event)
        self._suspended_s = self.clock.now_s()

    def begin_part(self) -> None:
        """Notes that a span of compute begins."""
        self._part_s = self.clock.now_s()

    def end_part(self, name: str, **attributes: object) -> None:
        """Ends the span of compute: the pass has ended, or was suspended at a boundary."""
        now_s = self.clock.now_s()
        self.spans.append(span(name, self.instance_id, self._part_s, now_s, **attributes))

    def since_monotonic_s(self, monotonic_s: float) -> float:
        """Converts a time of time.monotonic to seconds since the request's arrival."""
        return self.clock.now_s() - (time.monotonic() - monotonic_s)
