"""What goes wrong with chunks that begin now: errors of an instance, and slow instances."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from millrace.core.scheduler.reports import RequestFailed
from millrace.sim.cluster.job import Attempt
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.models.prefill_instance import PrefillInstance


class ChunkFaults:
    """Draws from a seed of its own, so that faults change no other draw of a run."""

    def __init__(self, spec: SimSpec) -> None:
        self._errors = spec.errors
        self._slowness = spec.slowness
        self._random = Random(f"{spec.seed} errors")

    def failing(self, members: Sequence[PrefillInstance], now_s: float) -> PrefillInstance | None:
        """Returns the member at which a chunk fails that begins now, if one does."""
        for one in self._errors:
            if one.is_on(now_s):
                for member in members:
                    if member.id == one.instance_id and self._random.random() < one.share:
                        return member
        return None

    def factor(self, members: Sequence[PrefillInstance], now_s: float) -> float:
        """Returns how many times as long a chunk takes that begins now."""
        names = {member.id for member in members}
        return max(
            (one.factor for one in self._slowness if one.instance_id in names and one.is_on(now_s)),
            default=1.0,
        )


def error_of(attempt: Attempt) -> RequestFailed:
    """Returns the report of an instance whose engine failed a chunk of the attempt."""
    return RequestFailed(
        request_id=attempt.job.id,
        message="an error of the simulation",
        retryable=False,
        attempt=attempt.number,
        fault="compute",
    )
