"""One request's stay at a prefill instance."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.engine.sampling_spec import SamplingSpec
from millrace.transfer.send_manager import SendSession
from millrace.wire.pb import common_pb2, scheduler_pb2
from millrace.worker.codec import Stopwatch, sampling_spec


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
    spans: list[common_pb2.Span] = field(default_factory=list)

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
