"""Explains a request of a recorded run from the decisions of that run, which is replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millrace.core.config import SchedulerConfig
from millrace.core.request import RequestState
from millrace.core.scheduler.effects import Effect, Record, RunPrefill
from millrace.core.scheduler.events import Event
from millrace.core.scheduler.explanation.explain import Explanation
from millrace.core.scheduler.machine import Machine
from millrace.sim.replay import replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What the scheduler would have said at one moment of the run."""

    when: str
    after_s: float  # its arrival
    explanation: Explanation


def explain_recorded(path: Path, request_id: str) -> list[Moment]:
    """Returns the moments that decided when the request had its first token: after its arrival,
    before each plan that was not made at once, at its first token and at its end.

    Empty for a request that the recording does not have. Raises RecordingError for a file that is
    no recording.
    """
    follower = _Follower(request_id)
    replay(path, follower.around)
    return follower.moments


class _Follower:
    """Steps a machine and asks it about one request."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._arrival_s: float | None = None
        self._planned = 0  # the attempt whose plan was noted
        self.moments: list[Moment] = []

    def around(self, config: SchedulerConfig) -> Callable[[Event, float], list[Effect]]:
        """Returns the step of a new machine, which is asked before and after its steps."""
        machine = Machine(config)

        def step(event: Event, now_s: float) -> list[Effect]:
            before = self._asked(machine, now_s)
            effects = machine.step(event, now_s)
            after = self._asked(machine, now_s)
            if self._arrival_s is None and after is not None:
                self._arrival_s = now_s
                self._note("when it came", after, now_s)
            for effect in effects:
                self._saw(effect, before, after, now_s)
            return effects

        return step

    def _asked(self, machine: Machine, now_s: float) -> Explanation | None:
        request = machine.requests.get(self._id)
        if request is None and self._arrival_s is None:
            return None
        return machine.explain(self._id, now_s)

    def _saw(
        self, effect: Effect, before: Explanation | None, after: Explanation | None, now_s: float
    ) -> None:
        if not isinstance(effect, RunPrefill | Record) or effect.request_id != self._id:
            return
        if isinstance(effect, RunPrefill):
            if effect.attempt != self._planned and before is not None:
                self._planned = effect.attempt  # every instance of the plan gets the effect
                self._note("before its plan", before, now_s)
        elif after is not None and effect.state is RequestState.TRANSFERRING:
            self._note("at its first token", after, now_s)
        elif after is not None and effect.state.is_final:
            self._note("at its end", after, now_s)

    def _note(self, when: str, explanation: Explanation, now_s: float) -> None:
        after_s = now_s - (self._arrival_s or 0.0)
        self.moments.append(Moment(when=when, after_s=after_s, explanation=explanation))
