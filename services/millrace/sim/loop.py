"""The simulation: arrivals and models on one clock, and the scheduler's machine between them.

As in the live system, `Machine.step` takes every decision. Models of the instances carry its
effects out and report back. Commands and reports take `control_s` each way. With `control_s` 0 they
take effect in the same instant, reports before the instances continue, so that the machine decides
what runs next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from millrace.core.board.events import line_of
from millrace.core.board.observer import Observer
from millrace.core.errors import IntegrityError
from millrace.core.request import Request, Slo
from millrace.core.scheduler import effects as fx
from millrace.core.scheduler import events
from millrace.core.scheduler.machine import Machine
from millrace.core.weights import Weights
from millrace.sim.cluster.job import Job
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.cluster.world import World
from millrace.sim.faults import Faults
from millrace.sim.fleet import Fleet
from millrace.sim.results.counters import EngineCounters
from millrace.sim.results.report import Collector, RequestRecord
from millrace.sim.results.timeline import Timeline
from millrace.sim.scaling import Scaling
from millrace.sim.workload.workload import PlannedRequest, SloClass

#: Requests between two calls of `progress`.
PROGRESS_EVERY = 100

_TO_INSTANCES = (fx.AdmitDecode, fx.RunPrefill, fx.Order, fx.CancelOn)


class Simulation:
    """One run. `progress(ended, now_s)` is called at intervals; `stop(collector)` after every
    request, and ends the run early when true. `machine`: one that observes itself. `board` gets the
    lines of the board (`core.board`)."""

    def __init__(
        self,
        spec: SimSpec,
        requests: Iterator[PlannedRequest],
        collector: Collector,
        timeline: Timeline | None = None,
        progress: Callable[[int, float], None] | None = None,
        stop: Callable[[Collector], bool] | None = None,
        machine: Machine | None = None,
        board: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.machine = machine or Machine(spec.scheduler)
        self._board = board
        self._observer = Observer(self.machine)
        self._spec = spec
        self._requests = requests
        self._collector = collector
        self._progress = progress
        self._stop = stop
        self._stopped = False
        self.world = World(spec, timeline)
        self.clock = self.world.clock
        self._tally = self.world.tally
        self._fleet = Fleet(self.world)
        self._faults = Faults(self.world, self._fleet)
        self._scaling: Scaling | None = None
        if spec.autoscale is not None:
            self._scaling = Scaling(self.world, self._fleet, self.machine, spec.autoscale)
        self._slos: dict[SloClass, Slo] = {}
        self._tick_rounds = 0
        self._ticking = False
        self.world.finished = self._finished

    def run(self) -> EngineCounters:
        """Simulates until all requests have ended.

        Raises IntegrityError when any request or holding is left: a defect of the machine or of a
        model.
        """
        if self._spec.weights != Weights():
            self._step(events.WeightsChanged(weights=self._spec.weights))
        for card in self._fleet.start():
            self._step(card)
        self._arrive_next()
        while not self._stopped and (self.world.jobs or self._next is not None):
            self.clock.run_next()
            self._settle()
        duration_s = self.clock.now_s
        self._faults.over = True
        if self._scaling is not None:
            self._scaling.over = True
        self._fleet.close(duration_s)
        while not self._stopped and self.clock.next_s is not None:
            self.clock.run_next()
            self._settle()
        if not self._stopped:
            self._check_empty()
        self._tally.rounds = self.machine.rounds - self._tick_rounds
        self._tally.breaker_openings = self.machine.breakers.opened
        return self._tally.counters(duration_s, self.clock.ran)

    # ---- arrivals

    def _arrive_next(self) -> None:
        self._next = next(self._requests, None)
        if self._next is not None:
            self.clock.at(self._next.arrival_s, self._arrive)

    def _arrive(self, nothing: None) -> None:
        del nothing
        plan = self._next
        assert plan is not None  # set with the callback
        self._tally.requests += 1
        slo = self._slos.get(plan.slo)
        if slo is None:
            slo = self._slos[plan.slo] = Slo(
                ttft_s=plan.slo.ttft_s,
                tbt_s=plan.slo.tbt_s,
                e2e_s=plan.slo.e2e_s,
                class_name=plan.slo.name,
            )
        request = Request(
            id=f"r{plan.index}",
            proxy_id="sim",
            prompt_tokens=plan.input_tokens,
            max_new_tokens=plan.output_tokens,
            slo=slo,
            arrival_s=plan.arrival_s,
            tenant=plan.tenant,
        )
        job = Job(plan, request, self._fleet.isolated_s(plan.input_tokens))
        self.world.jobs[request.id] = job
        self._arrive_next()
        if not self._ticking:
            self._ticking = True
            self.clock.at(self.clock.now_s + self._spec.scheduler.heartbeat_s, self._tick)
        effects = self._step(events.Submitted(request=request))
        job.live = self.machine.requests.get(request.id)
        self._carry_out(effects)

    def _tick(self, nothing: None) -> None:
        """Lets the machine check deadlines while there are requests."""
        del nothing
        self._ticking = bool(self.world.jobs)
        before = self.machine.rounds
        self._carry_out(self._step(events.Tick()))
        self._tick_rounds += self.machine.rounds - before
        if self._ticking:
            self.clock.at(self.clock.now_s + self._spec.scheduler.heartbeat_s, self._tick)

    # ---- between machine and models

    def _step(self, event: events.Event) -> list[fx.Effect]:
        self._tally.steps += 1
        effects = self.machine.step(event, self.clock.now_s)
        if self._scaling is not None:
            self._scaling.saw(event, effects)
        if self._board is not None:
            now_s = self.clock.now_s
            for found in self._observer.saw(event, effects, now_s):
                self._board(line_of(found, now_s))
        return effects

    def _settle(self) -> None:
        """Brings reports to the machine and lets instances continue, until nothing changes."""
        control_s = self._spec.control_s
        world = self.world
        while True:
            if world.outbox:
                reports, world.outbox = world.outbox, []
                if control_s > 0.0:
                    self.clock.at(self.clock.now_s + control_s, self._hear, reports)
                else:
                    self._hear(reports)
            elif not self._fleet.settle():
                return

    def _hear(self, reports: list[events.Event]) -> None:
        found: list[fx.Effect] = []
        for report in reports:
            found += self._step(report)
        self._carry_out(found)

    def _carry_out(self, found: list[fx.Effect]) -> None:
        commands = []
        for effect in found:
            if isinstance(effect, _TO_INSTANCES):
                commands.append(self._fleet.addressed(effect))
            elif isinstance(effect, fx.Refuse):
                self._tally.refused += 1
                self._fail(effect.request_id, effect.code)
            elif isinstance(effect, fx.Fail):
                self._fail(effect.request_id, "failed")
        if not commands:
            return
        self._tally.commands += len(commands)
        if self._spec.control_s > 0.0:
            self.clock.at(self.clock.now_s + self._spec.control_s, self._fleet.deliver, commands)
        else:
            self._fleet.deliver(commands)

    # ---- ends

    def _finished(self, job: Job) -> None:
        """Notes that the request has its last token."""
        if self.world.jobs.pop(job.id, None) is None:
            return
        plan, now_s = job.plan, self.clock.now_s
        assert job.first_token_s is not None and job.first_start_s is not None
        tokens = plan.output_tokens
        tbt_s = (now_s - job.first_token_s) / (tokens - 1) if tokens > 1 else None
        self._tally.finished += 1
        record = self._record(job)
        record.ttft_s = job.first_token_s - plan.arrival_s
        record.tbt_s = tbt_s
        record.e2e_s = now_s - plan.arrival_s
        record.queued_s = job.first_start_s - plan.arrival_s
        self._add(record)

    def _fail(self, request_id: str, error: str) -> None:
        job = self.world.jobs.pop(request_id, None)
        if job is not None:
            self._tally.failed += 1
            record = self._record(job)
            record.error = error
            self._add(record)

    def _record(self, job: Job) -> RequestRecord:
        plan = job.plan
        return RequestRecord(
            index=plan.index,
            class_name=plan.slo.name,
            arrival_s=plan.arrival_s,
            input_tokens=plan.input_tokens,
            output_tokens=plan.output_tokens,
            ttft_slo_s=plan.slo.ttft_s,
            tbt_slo_s=plan.slo.tbt_s,
            e2e_slo_s=plan.slo.e2e_s,
            isolated_s=job.isolated_s,
            suspended_s=job.suspended_s,
            longest_suspension_s=job.longest_suspension_s,
            chunks=job.chunks,
            sp=job.sp,
            attempts=job.attempts,
            tenant=plan.tenant,
        )

    def _add(self, record: RequestRecord) -> None:
        self._collector.add(record)
        ended = self._tally.finished + self._tally.failed
        if self._progress is not None and ended % PROGRESS_EVERY == 0:
            self._progress(ended, self.clock.now_s)
        if self._stop is not None and self._stop(self._collector):
            self._stopped = True

    def _check_empty(self) -> None:
        self.machine.check_integrity()
        if self.machine.requests:
            raise IntegrityError(f"requests never ended: {sorted(self.machine.requests)[:8]}")
        self._fleet.check_empty()
        if self.machine.release_timeouts:
            raise IntegrityError(
                f"{self.machine.release_timeouts} holdings were never released by their instances"
            )
