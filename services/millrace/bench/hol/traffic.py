"""Traffic of `millrace bench hol`: FlowPrefill's four classes, scaled to the machine.

Lengths are Table 1's, drawn as in `sim.workload.mixes` and divided by the run's scale. The
objective of a class is a multiple of its isolated TTFT, which the run measures with a prompt of the
class's mean length, alone in the stack. The multiple is Table 2's objective for Llama-3-8B over
that length's prefill on an A100 (by the shipped profile): 5.9 for text, 12.8 for image, 9.8 for
search, 12.8 for file. So objectives are as tight as in the paper on any machine.

Arrivals are Poisson. A rate scales the gaps and keeps the requests, as in the paper. A run lasts
several times the longest objective, so higher rates send more requests: of a shorter run a large
part would be computed after the last arrival, and a system could carry rates beyond its capacity.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from millrace.bench.common.report import RequestRecord
from millrace.experiments.flowprefill import common as flowprefill
from millrace.sim.scenario import misses_allowed
from millrace.sim.workload.mixes import MixOptions, build_mix, table_2
from millrace.sim.workload.traces import TraceRow
from millrace.sim.workload.workload import (
    PlannedRequest,
    RowDraw,
    SloClass,
    WorkloadOptions,
    plan,
)

#: Table 1: mean prompt length of each class.
MEAN_TOKENS: Mapping[str, int] = {"text": 590, "image": 532, "search": 5976, "file": 6833}

#: The attainment that a goodput must reach: goodput's definition, section 6.1.
GOAL = 0.9

#: Table 1: the P99 of the longest class.
FILE_P99_TOKENS = 22_390

_PAPER_MODEL = "Llama-3-8B"
#: The share of each class that is asked for beside `GOAL`.
CLASS_GOAL = 0.8
_DRAWN = 4000  # requests that the bound of an order is computed from
_NO_HOPE = 2  # times the allowed misses: the rate is far too high, and the run ends


def mean_tokens(scale: float) -> dict[str, int]:
    """Returns a prompt of each class's mean length, scaled."""
    return {name: max(1, round(tokens / scale)) for name, tokens in MEAN_TOKENS.items()}


def multiples() -> dict[str, float]:
    """Returns Table 2's objective of each class over its mean prompt's prefill alone,
    Llama-3-8B.
    """
    latency = flowprefill.operator_profile(flowprefill.MODELS[_PAPER_MODEL]).prefill
    objectives = table_2("llama3-8b")
    return {name: objectives[name] / latency.isolated_s(n) for name, n in MEAN_TOKENS.items()}


def objectives(isolated_s: Mapping[str, float], slo_scale: float = 1.0) -> list[SloClass]:
    """Returns the classes with objectives for isolated TTFTs in seconds, all times `slo_scale`."""
    return [
        SloClass(name=name, ttft_s=slo_scale * times * isolated_s[name])
        for name, times in multiples().items()
    ]


def capacity_rps(isolated_s: Mapping[str, float]) -> float:
    """Estimates one instance's capacity from the classes' isolated TTFTs and shares."""
    kinds = build_mix("qwen", MixOptions()).classes
    shares = {kind.slo.name: kind.slo.weight for kind in kinds}
    work_s = sum(shares[name] * seconds for name, seconds in isolated_s.items())
    return sum(shares.values()) / work_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of every run, the same ones at any rate: at least `requests`, and for at least
    `least_s` seconds. A prompt has at most `most_tokens`.
    """

    classes: tuple[SloClass, ...]
    scale: float
    requests: int
    most_tokens: int
    least_s: float = 0.0

    def at(self, rate_rps: float, seed: int) -> WorkloadOptions:
        """Returns a run with one output token per request: later tokens are not measured."""
        return WorkloadOptions(
            draw_row=_scaled(build_mix("qwen", MixOptions()).row_draw(), self.scale),
            rate_rps=rate_rps,
            max_input_tokens=self.most_tokens,
            classes=self.classes,
            requests=max(self.requests, math.ceil(rate_rps * self.least_s)),
            seed=seed,
        )

    def most_rps(
        self, prefill_s: Callable[[int], float], seed: int, class_goal: float = 0.0
    ) -> float:
        """Returns the rate that no order of whole prompts exceeds, if `GOAL` of all requests are to
        be in time, and `class_goal` of each class: the longest prompts are given up, and all others
        keep one instance busy. `prefill_s`: of a prompt of so many tokens alone.
        """
        requests = list(plan(replace(self, requests=_DRAWN, least_s=0.0).at(1.0, seed)))
        known = Counter(request.slo.name for request in requests)
        spare = {name: math.floor((1.0 - class_goal) * count) for name, count in known.items()}
        left = misses_allowed(len(requests), GOAL)
        work_s = 0.0
        for request in sorted(requests, key=lambda one: -one.input_tokens):
            if left and spare[request.slo.name]:
                left -= 1
                spare[request.slo.name] -= 1
            else:
                work_s += prefill_s(request.input_tokens)
        return len(requests) / work_s


def _scaled(draw: RowDraw, scale: float) -> RowDraw:
    def scaled(rng: random.Random) -> TraceRow:
        row = draw(rng)
        return replace(row, input_tokens=max(1, round(row.input_tokens / scale)), output_tokens=1)

    return scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """Requests within their objective, among the requests with a known outcome, at one rate.

    `stopped`: the run ended early, so the shares are of its first requests. `errors`: failed
    requests by kind; they count as missed.
    """

    rate_rps: float
    met: Mapping[str, int]
    known: Mapping[str, int]
    stopped: bool = False
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Returns the share of all, 0 to 1."""
        return sum(self.met.values()) / max(1, sum(self.known.values()))

    @property
    def carried(self) -> bool:
        return not self.stopped and self.total >= GOAL - 1e-9

    @property
    def carried_by_class(self) -> bool:
        """Returns whether every class has `CLASS_GOAL` in time beside `GOAL` of all."""
        return self.carried and min(self.by_class.values(), default=1.0) >= CLASS_GOAL - 1e-9

    @property
    def by_class(self) -> dict[str, float]:
        return {name: self.met[name] / known for name, known in self.known.items() if known}


@dataclass(slots=True, kw_only=True)
class Watch:
    """Follows a run of `planned`, to end it once its outcome can't change any more.

    Times are seconds since the run's start; a request that has not ended counts as missed `grace_s`
    after its objective.
    """

    planned: tuple[PlannedRequest, ...]
    grace_s: float = 0.25
    _ended: dict[int, bool] = field(default_factory=dict)  # by index: in time or not
    _errors: Counter[str] = field(default_factory=Counter)

    def end(self, record: RequestRecord) -> None:
        """Notes a request that ended."""
        if record.error:
            self._errors[f"{record.error}: {record.detail}"] += 1
        self._ended[record.index] = record.meets_ttft(self.planned[record.index].slo)

    def is_over(self, now_s: float) -> bool:
        """Returns True when all outcomes are known, or too many requests have missed."""
        outcomes = list(self._known(now_s))
        missed = sum(not met for _, met in outcomes)
        most = _NO_HOPE * misses_allowed(len(self.planned), GOAL)
        return missed > most or len(outcomes) == len(self.planned)

    def attainment(self, rate_rps: float, now_s: float) -> Attainment:
        """Returns the known outcomes at `now_s`."""
        met = {request.slo.name: 0 for request in self.planned}
        known = dict(met)
        for request, is_met in self._known(now_s):
            met[request.slo.name] += is_met
            known[request.slo.name] += 1
        stopped = sum(known.values()) < len(self.planned)
        return Attainment(
            rate_rps=rate_rps, met=met, known=known, stopped=stopped, errors=dict(self._errors)
        )

    def _known(self, now_s: float) -> Iterable[tuple[PlannedRequest, bool]]:
        for request in self.planned:
            ended = self._ended.get(request.index)
            due_s = request.arrival_s + (request.slo.ttft_s or 0.0) + self.grace_s
            if ended is not None:
                yield request, ended
            elif now_s > due_s:
                yield request, False
