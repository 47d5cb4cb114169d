"""The state of one request at a prefill instance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from millrace.core.errors import MillraceError
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import RING_BUFFERS, Layout, Run, layout
from millrace.core.request import Chunk
from millrace.core.scheduler.commands import RunPrefill
from millrace.core.span import Span
from millrace.engine.sampling.spec import SamplingSpec
from millrace.instance.sampling import sampling_spec
from millrace.instance.spans import Stopwatch, span
from millrace.prefill.metrics import PrefillMetrics
from millrace.transfer.push.control import Sending
from millrace.transfer.ring.manager import GroupLink

PREEMPTED: Final = "preempted"
LATER_STAGES: Final = "later_stages"  # its pass is there; the first stage has no work


class Cancelled(Exception):
    """Raised in a cancelled job, whose result is no longer wanted."""


@dataclass(slots=True, eq=False)
class PrefillJob:
    """The instance's record of a request, from the command to the release.

    ``layout`` is set by the preparation if the job `is_shared`; ``link`` to the other members is
    set when all have joined.
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
    group_failure: MillraceError | None = None  # why the group failed
    cancelled: str = ""  # the reason; set from the event loop, read by the compute thread
    spans: list[Span] = field(default_factory=list)
    _began: bool = False
    _part_s: float = 0.0  # when the current span of compute began
    _suspended_s: float | None = None  # since when it is suspended
    _suspended_why: str = ""
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

    def cancel(self, reason: str) -> None:
        """Cancels the job: a wait ends at once, a computation within one operator."""
        if not self.cancelled:
            self.cancelled = reason
            self._interrupt()

    def fail(self, error: MillraceError) -> None:
        """Ends the job as `cancel` does, with the error of its failed group."""
        if self.group_failure is None:
            self.group_failure = error
            self._interrupt()

    def _interrupt(self) -> None:
        if self.link is not None:
            self.link.abort()
        if self._waiter is not None:
            self._waiter.cancel()

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Lets `cancel` and `fail` interrupt the block's waits, in the job's own task.

        Raises Cancelled, or the group's failure.
        """
        if (failure := self.stopped()) is not None:
            raise failure
        task = self._waiter = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            failure = self.stopped()
            if task is None or failure is None:
                raise  # the whole process ends
            task.uncancel()
            raise failure from None
        finally:
            self._waiter = None

    def stopped(self) -> Exception | None:
        """Returns why the result is no longer wanted; None while it is wanted."""
        return Cancelled() if self.cancelled else self.group_failure

    # -- spans of its time in the execution pool

    def found(self, cached_tokens: int) -> None:
        """Notes that the first `cached_tokens` tokens need no compute."""
        now_s, self.cached_tokens = self.clock.now_s(), cached_tokens
        self.spans.append(span("cached", self.instance_id, now_s, now_s, tokens=cached_tokens))

    def go_on(self, metrics: PrefillMetrics) -> None:
        """Notes that the compute starts, or resumes after a suspension."""
        now_s = self.clock.now_s()
        if not self._began:
            self._began = True
            self.spans.append(span("queued", "scheduler", 0.0, self.received_s))
            self.spans.append(span("waiting", self.instance_id, self.received_s, now_s))
            metrics.wait_s.observe(now_s - self.received_s)
        elif self._suspended_s is not None:
            why = self._suspended_why
            self.spans.append(span(why, self.instance_id, self._suspended_s, now_s))
            waited = metrics.suspended_s if why == PREEMPTED else metrics.later_stages_s
            waited.observe(now_s - self._suspended_s)
        self._suspended_s = None

    def suspend(self, why: str) -> None:
        """Notes that another task computes until `go_on`. `why`: the name of the span till then."""
        self._suspended_s, self._suspended_why = self.clock.now_s(), why

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
