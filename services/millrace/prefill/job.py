"""One request's stay at a prefill instance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from millrace.engine.sampling_spec import SamplingSpec
from millrace.transfer.send_manager import SendSession
from millrace.wire.pb import common_pb2, scheduler_pb2
from millrace.worker.codec import Stopwatch, sampling_spec


class Cancelled(Exception):
    """The job was cancelled: nobody wants its result any more."""


@dataclass(slots=True, eq=False)
class PrefillJob:
    """What the instance holds for a request, from the command to the release."""

    command: scheduler_pb2.RunPrefill
    clock: Stopwatch
    sampling: SamplingSpec
    received_s: float
    pages: list[int] = field(default_factory=list)
    session: SendSession | None = None
    cancelled: str = ""  # the reason; set from the event loop, read by the compute thread
    computing: bool = False
    spans: list[common_pb2.Span] = field(default_factory=list)
    _waiter: asyncio.Task[None] | None = None

    @staticmethod
    def of(command: scheduler_pb2.RunPrefill) -> PrefillJob:
        clock = Stopwatch(command.request.arrival_unix_s)
        return PrefillJob(
            command=command,
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

    def since_monotonic_s(self, monotonic_s: float) -> float:
        """A time of time.monotonic as seconds since the request's arrival."""
        return self.clock.now_s() - (time.monotonic() - monotonic_s)
