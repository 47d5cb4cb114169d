"""One request's stay at a prefill instance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from millrace.engine.sampling_spec import SamplingSpec
from millrace.prefill.metrics import PrefillMetrics
from millrace.transfer.send_manager import SendSession
from millrace.wire.pb import common_pb2, scheduler_pb2
from millrace.worker.codec import Stopwatch, sampling_spec, span


class Cancelled(Exception):
    """The job was cancelled: nobody wants its result any more."""


@dataclass(slots=True, eq=False)
class PrefillJob:
    """What the instance holds for a request, from the command to the release."""

    command: scheduler_pb2.RunPrefill
    instance_id: str
    clock: Stopwatch
    sampling: SamplingSpec
    received_s: float
    pages: list[int] = field(default_factory=list)
    session: SendSession | None = None
    cancelled: str = ""  # the reason; set from the event loop, read by the compute thread
    spans: list[common_pb2.Span] = field(default_factory=list)
    _began: bool = False
    _part_s: float = 0.0  # when the stretch of compute at hand began
    _suspended_s: float | None = None  # since when it is suspended
    _waiter: asyncio.Task[None] | None = None

    @staticmethod
    def of(command: scheduler_pb2.RunPrefill, instance_id: str) -> PrefillJob:
        clock = Stopwatch(command.request.arrival_unix_s)
        return PrefillJob(
            command=command,
            instance_id=instance_id,
            clock=clock,
            sampling=sampling_spec(command.request.sampling),
            received_s=clock.now_s(),
        )

    @property
    def request_id(self) -> str:
        return self.command.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return self.command.request.prompt_tokens

    def cancel(self, reason: str) -> None:
        """Ends the wait that the job is in; one that computes stops within one operator."""
        if not self.cancelled:
            self.cancelled = reason
            if self._waiter is not None:
                self._waiter.cancel()

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """A stage of waits that `cancel` interrupts. Raises Cancelled, in the job's own task."""
        if self.cancelled:
            raise Cancelled
        task = self._waiter = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if task is None or not self.cancelled:
                raise  # the whole process ends
            task.uncancel()
            raise Cancelled from None
        finally:
            self._waiter = None

    # -- its way through the execution pool, as spans

    def go_on(self, metrics: PrefillMetrics) -> None:
        """It begins to compute, or goes on after a suspension."""
        now_s = self.clock.now_s()
        if not self._began:
            self._began = True
            self.spans.append(span("queued", "scheduler", 0.0, self.received_s))
            self.spans.append(span("waiting", self.instance_id, self.received_s, now_s))
            metrics.wait_s.observe(now_s - self.received_s)
        elif self._suspended_s is not None:
            self.spans.append(span("preempted", self.instance_id, self._suspended_s, now_s))
            metrics.suspended_s.observe(now_s - self._suspended_s)
        self._suspended_s = None

    def suspend(self) -> None:
        """Another computes in its place until `go_on`."""
        self._suspended_s = self.clock.now_s()

    def begin_part(self) -> None:
        """A stretch of compute begins."""
        self._part_s = self.clock.now_s()

    def end_part(self, name: str, **attributes: object) -> None:
        """The stretch is over: the pass has ended, or was left at a boundary."""
        now_s = self.clock.now_s()
        self.spans.append(span(name, self.instance_id, self._part_s, now_s, **attributes))

    def since_monotonic_s(self, monotonic_s: float) -> float:
        """A time of time.monotonic as seconds since the request's arrival."""
        return self.clock.now_s() - (time.monotonic() - monotonic_s)
