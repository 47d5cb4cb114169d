"""Makes a report of a recording of `--record`: the run is replayed and watched."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from millrace.core.autoscale.load_meter import LoadMeter
from millrace.core.config import SchedulerConfig
from millrace.core.errors import ConfigError
from millrace.core.live_request import LiveRequest
from millrace.core.request import RequestState
from millrace.core.scheduler.effects import Effect, Place, Record, Refuse
from millrace.core.scheduler.events import Event, Reported, Submitted
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.outcomes.objectives import mean_tbt_s
from millrace.core.scheduler.reports import RequestFinished
from millrace.sim.replay import ReplayResult, began_unix_s, replay
from millrace.sim.reports.pools import PoolSamples
from millrace.sim.reports.report import Outcome, RunReport, report_of

#: The distance of two samples of the load.
SAMPLE_S = 1.0


class EmptyRange(ConfigError):
    """No request came in the range."""


def report_of_recording(
    path: Path, *, from_s: float = 0.0, to_s: float = math.inf, worst: int = 5
) -> RunReport:
    """Returns the report of the requests that came from `from_s` on and before `to_s`, in seconds
    after the recording's first step.

    Raises ConfigError for a range without requests, RecordingError for a file that is no recording.
    """
    follower = _Follower(from_s, to_s)
    result = replay(path, follower.around)
    follower.end()
    found = follower.outcomes
    if not found:
        raise EmptyRange(
            f"{path}: no request came from {from_s:g} to {to_s:g} s; the recording has "
            f"{follower.requests} requests in {result.duration_s:.3g} s"
        )
    end_s = max(min(to_s, result.duration_s), from_s + SAMPLE_S)
    return report_of(
        found,
        follower.pools.rows(),
        began_unix_s=began_unix_s(path),
        from_s=from_s,
        to_s=end_s,
        worst=worst,
        notes=_notes(result),
    )


def _notes(result: ReplayResult) -> list[str]:
    notes = []
    if result.difference is not None:
        where = f"line {result.difference.line}"
        notes.append(f"this version decides otherwise from {where} on: the report ends there")
    if result.cut:
        notes.append("the recording's last line is not whole, and is left out")
    return notes


class _Follower:
    """Steps a machine, notes what becomes of the requests of a range, and samples the load."""

    def __init__(self, from_s: float, to_s: float) -> None:
        self._range = from_s, to_s
        self._zero_s: float | None = None
        self._now_s = 0.0
        self._sampled_s = -math.inf
        self._open: dict[str, LiveRequest] = {}
        self._models: dict[str, str] = {}  # of open requests
        self.requests = 0
        self.outcomes: list[Outcome] = []
        self.pools = PoolSamples()

    def around(self, config: SchedulerConfig) -> Callable[[Event, float], list[Effect]]:
        """Returns the step of a new machine."""
        self._machine = machine = Machine(config)
        meter: LoadMeter | None = None

        def step(event: Event, now_s: float) -> list[Effect]:
            nonlocal meter
            if meter is None:
                meter, self._zero_s = LoadMeter(machine, now_s), now_s
            self._now_s = now_s
            effects = machine.step(event, now_s)
            meter.saw(event, effects, now_s)
            if isinstance(event, Submitted):
                self._came(event, effects)
            for effect in effects:
                self._saw(effect, event)
            if self._is_due(now_s):
                self.pools.add(meter.load(now_s), now_s)
            return effects

        return step

    def end(self) -> None:
        """Notes the requests that have not ended, as they are."""
        for request in list(self._open.values()):
            self._ended(request, request.state.value)

    def _since(self, at_s: float) -> float:
        return at_s - (self._zero_s or 0.0)

    def _is_due(self, now_s: float) -> bool:
        from_s, to_s = self._range
        if not from_s <= self._since(now_s) < to_s or now_s < self._sampled_s + SAMPLE_S:
            return False
        self._sampled_s = now_s
        return True

    def _came(self, event: Submitted, effects: list[Effect]) -> None:
        asked = event.request
        self.requests += 1
        request = self._machine.requests.get(asked.id)
        if not self._range[0] <= self._since(self._now_s) < self._range[1]:
            return
        if request is not None and request.spec is asked:
            self._open[asked.id] = request
        elif any(isinstance(one, Refuse) and one.request_id == asked.id for one in effects):
            self._ended(LiveRequest(asked), "refused")

    def _saw(self, effect: Effect, event: Event) -> None:
        if isinstance(effect, Place) and effect.request_id in self._open:
            owner = self._machine.cluster.instances.get(effect.decode_id)
            if owner is not None:
                self._models[effect.request_id] = owner.card.model_hash
        elif isinstance(effect, Record) and effect.state.is_final:
            request = self._open.get(effect.request_id)
            if request is not None:
                met_all = _met_all(request, event, self._now_s)
                self._ended(request, effect.state.value, met_all)

    def _ended(self, request: LiveRequest, state: str, met_all: bool | None = None) -> None:
        known = self._open.pop(request.id, None) is not None
        why = self._machine.explain(request.id, self._now_s) if known else None
        first_s = request.first_token_s
        helps = why.helps[0] if why is not None and why.helps else None
        self.outcomes.append(
            Outcome(
                request_id=request.id,
                slo_class=request.slo.class_name,
                tenant=request.tenant,
                model=self._models.pop(request.id, ""),
                prompt_tokens=request.prompt_tokens,
                arrived_s=self._since(request.arrival_s),
                state=state,
                ttft_s=None if first_s is None else first_s - request.arrival_s,
                objective_s=request.allowed_ttft_s if known else request.slo.ttft_s,
                late_s=self._now_s - request.arrival_s,
                met_all=met_all,
                waited=() if why is None else why.waited,
                suspended_by=() if why is None else why.suspended_by,
                helps="" if helps is None else f"{helps.what}: {helps.saves_s:.3g} s",
            )
        )


def _met_all(request: LiveRequest, event: Event, now_s: float) -> bool | None:
    """Whether a request that `event` ended met all its objectives; None without any, and of one
    that was cancelled.
    """
    slo = request.slo
    if slo.ttft_s is None and slo.tbt_s is None and slo.e2e_s is None:
        return None
    if request.state is RequestState.FAILED:
        return False
    report = event.report if isinstance(event, Reported) else None
    if not isinstance(report, RequestFinished) or request.first_token_s is None:
        return None
    ttft_s, e2e_s = request.first_token_s - request.arrival_s, now_s - request.arrival_s
    tbt_s = mean_tbt_s(request, report.generated_tokens, now_s) or 0.0
    taken = ((ttft_s, slo.ttft_s), (tbt_s, slo.tbt_s), (e2e_s, slo.e2e_s))
    return all(allowed_s is None or seconds <= allowed_s for seconds, allowed_s in taken)
