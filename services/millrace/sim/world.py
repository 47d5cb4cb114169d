"""What all models of one simulation share."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from millrace.core.events import Event
from millrace.sim.clock import Clock
from millrace.sim.counters import Tally
from millrace.sim.job import Job
from millrace.sim.spec import SimSpec
from millrace.sim.timeline import Timeline


class World:
    """Time, the requests that have not ended, and what instances have to say.

    Models append what they report to `outbox`; the loop brings it to the scheduler once the
    callback that is running has returned. `finished(job)` is called when a request has its last
    token.
    """

    __slots__ = ("clock", "finished", "jobs", "outbox", "rng", "spec", "tally", "timeline")

    def __init__(self, spec: SimSpec, timeline: Timeline | None) -> None:
        self.spec = spec
        self.timeline = timeline
        self.clock = Clock()
        self.tally = Tally()
        self.rng = Random(spec.seed)
        self.jobs: dict[str, Job] = {}
        self.outbox: list[Event] = []
        self.finished: Callable[[Job], None] = _nobody

    def noise(self) -> float:
        """True over predicted seconds of one piece of work; its mean is 1."""
        sigma = self.spec.noise
        return self.rng.lognormvariate(-sigma * sigma / 2, sigma) if sigma else 1.0


def _nobody(job: Job) -> None:
    del job
