"""The state that all models of one simulation share."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from millrace.core.errors import IntegrityError
from millrace.core.scheduler.events import Event, Reported
from millrace.core.scheduler.reports import Report, RequestFinished, RequestReleased
from millrace.sim.cluster.batch import Sequence
from millrace.sim.cluster.clock import Clock
from millrace.sim.cluster.job import Job
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.results.counters import Tally
from millrace.sim.results.timeline import Timeline


class World:
    """Holds the time, the requests that have not ended, and the reports of the instances.

    Models `report`; the loop brings the reports to the scheduler once the
    running callback has returned. `finished(job)` is called when a request has its last token.
    """

    __slots__ = (
        "clock",
        "finished",
        "jobs",
        "kvp_workers",
        "outbox",
        "rng",
        "spec",
        "tally",
        "timeline",
    )

    def __init__(self, spec: SimSpec, timeline: Timeline | None) -> None:
        self.spec = spec
        self.timeline = timeline
        self.clock = Clock()
        self.tally = Tally()
        self.rng = Random(spec.seed)
        self.jobs: dict[str, Job] = {}
        self.outbox: list[Event] = []
        self.finished: Callable[[Job], None] = _nobody
        #: Of requests that the scheduler spread, the KVP workers and their generations.
        self.kvp_workers: dict[str, dict[str, int]] = {}

    def noise(self) -> float:
        """Returns true over predicted seconds of one piece of work; the mean is 1."""
        sigma = self.spec.noise
        return self.rng.lognormvariate(-sigma * sigma / 2, sigma) if sigma else 1.0

    def onboard(self, job: Job, context_tokens: int) -> None:
        """Notes that so many tokens have KV, or are about to: further workers may hold some."""
        if job.spread is not None:
            workers = job.spread.degree(context_tokens) - 1
            self.tally.kvp_onboardings += max(workers - job.onboarded, 0)
            job.onboarded = max(workers, job.onboarded)

    def report(self, instance_id: str, generation: int, report: Report) -> None:
        """Sends an instance's report to the scheduler."""
        self.outbox.append(Reported(instance_id=instance_id, generation=generation, report=report))

    def served(self, instance_id: str, generation: int, job: Job) -> None:
        """Notes that the instance has given the request its last token."""
        self.finished(job)
        tokens = job.plan.output_tokens
        finished = RequestFinished(request_id=job.id, reason="length", generated_tokens=tokens)
        self.report(instance_id, generation, finished)
        for worker_id in list(self.kvp_workers.get(job.id, ())):
            self.let_go(worker_id, job.id)

    def held_at(self, worker_id: str, generation: int) -> list[str]:
        """Returns the requests of which this incarnation of an instance holds a shard."""
        return [
            name for name, held in self.kvp_workers.items() if held.get(worker_id) == generation
        ]

    def forget_worker(self, worker_id: str) -> None:
        """Notes that the instance has died with all its shards."""
        for held in self.kvp_workers.values():
            held.pop(worker_id, None)
        self.kvp_workers = {name: held for name, held in self.kvp_workers.items() if held}

    def let_go(self, worker_id: str, request_id: str) -> None:
        """Drops the instance's shard of the request, if it holds one."""
        held = self.kvp_workers.get(request_id, {})
        generation = held.pop(worker_id, None)
        if generation is None:
            return
        if not held:
            del self.kvp_workers[request_id]
        self.report(worker_id, generation, RequestReleased(request_id=request_id))

    def check_empty(self) -> None:
        """Raises IntegrityError when an instance still holds shards."""
        if self.kvp_workers:
            raise IntegrityError(f"shards are still held: {self.kvp_workers}")

    def left_batch(self, instance_id: str, sequence: Sequence) -> None:
        """Notes that a sequence left its batch, ended or not."""
        self.onboard(sequence.job, sequence.computed)
        if self.timeline is not None:
            job = sequence.job
            self.timeline.block(
                instance_id, sequence.joined_s, self.clock.now_s, job.plan.index, "decode"
            )


def _nobody(job: Job) -> None:
    del job
