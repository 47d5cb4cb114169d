"""Shared by the joined experiments: real and mixed traffic, one budget of GPUs, equal objectives.

Eight A100s prefill Llama-3-8B (TP 1) and eight decode (one TP 8 instance); systems that do both in
the same batches have the same sixteen. KV memory is ample and nothing is refused. A request has
Table 2's objective (the Qwen mix) or `SLO_SCALE` times the default objective, by its prefill alone
on the best group of the eight. Goodput is the largest load at which `GOAL` of the requests are in
time: of all requests, and for mixes with rare long requests of every class, since with 5 % of them
a system that never serves a long request would still be at 95 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

from millrace.core.config import SchedulerConfig
from millrace.core.errors import ConfigError
from millrace.core.instance.packing import PackingConfig
from millrace.experiments import unlimited
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.profiles import load_profile
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.results.plots import Panel
from millrace.sim.results.report import Report, RequestRecord
from millrace.sim.scenario import Scenario, Traffic, Watch, simulate
from millrace.sim.studies.search import largest_load

GOAL = 0.9
SLO_SCALE = 3.0
PREFILLS = 8
TOLERANCE = 0.04
#: Shorter prefills count as this long where a wait is divided by them.
LEAST_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Some traffic, a load near its edge, and whether every class must be in time."""

    traffic: Traffic
    start: float
    every_class: bool = False
    grouped: bool = True  # prompts are long enough for SP groups


def cases(folder: Path | None, quick: bool) -> dict[str, Case]:
    """Returns the mixes, and the traces found in `folder`.

    Raises ConfigError when it holds none.
    """

    def mix(name: str, requests: int, start: float, scale: float, **more: Any) -> Case:  # noqa: ANN401
        count = requests // 4 if quick else requests
        traffic = Traffic(mix=name, rate_rps=1.0, requests=count, slo_scale=scale)
        return Case(traffic=traffic, start=start, **more)

    found = {
        "Qwen mix": mix("qwen", 4000, 60.0, 1.0, grouped=False),
        "Tetris short": mix("tetris-short", 1200, 3.0, SLO_SCALE),
        "Tetris medium": mix("tetris-medium", 1200, 2.0, SLO_SCALE),
        "Tetris long": mix("tetris-long", 1200, 1.2, SLO_SCALE),
        "Medha mix": mix("medha-mix", 1500, 0.5, SLO_SCALE, every_class=True),
        "mixed": mix("mixed", 3000, 2.0, SLO_SCALE, every_class=True),
    }
    if folder is None:
        return found
    files = {
        "Azure code": ("azure2023_code.csv.gz", 4000, 1.0, False),
        "Azure conversation": ("azure2023_conv.csv.gz", 4000, 4.0, False),
        "Mooncake": ("mooncake_fast25_conversation.jsonl.gz", 2500, 2.0, True),
    }
    for name, (file, requests, start, grouped) in files.items():
        path = next((p for p in (folder / file, folder / file[: -len(".gz")]) if p.exists()), None)
        if path is None:
            raise ConfigError(f"--trace {folder}: {file} is not in it")
        count = requests // 4 if quick else requests
        traffic = Traffic(trace=path, requests=count, slo_scale=SLO_SCALE)
        found[name] = Case(traffic=traffic, start=start, grouped=grouped)
    return found


def further_cases(quick: bool) -> dict[str, Case]:
    """Returns agents with long documents, rare prompts of a million tokens, bursts, and a day."""
    return {
        name: Case(
            traffic=Traffic(
                mix=name,
                rate_rps=1.0,
                requests=750 if quick else 3000,
                slo_scale=SLO_SCALE,
            ),
            start=start,
        )
        for name, start in (("agents", 5.0), ("heavy-tail", 1.0), ("bursts", 9.0), ("diurnal", 7.0))
    }


def scheduler(**fields: Any) -> SchedulerConfig:  # noqa: ANN401
    """Returns the settings. Nothing is refused or given up: all requests count. Settings not named
    are off, or fixed.
    """
    return unlimited.scheduler(**{"batch_tokens": 0, "improvement_rate": 0.3, **fields})


def in_order(**fields: Any) -> SchedulerConfig:  # noqa: ANN401
    """First come, first served."""
    return scheduler(policy="fcfs", preemption="none", **fields)


def apart(config: SchedulerConfig, *, max_chunk_tokens: int = 0) -> SimSpec:
    """Prefill and decode on separate GPUs."""
    return SimSpec(
        profile=load_profile("llama3-8b-a100-tp1"),
        decode_profile=load_profile("llama3-8b-a100-tp8"),
        prefill=PREFILLS,
        decode=1,
        prefill_kv_tokens=50_000_000,
        decode_kv_tokens=200_000_000,
        max_batch=4096,
        max_chunk_tokens=max_chunk_tokens,
        scheduler=config,
    )


def together(config: SchedulerConfig, packing: PackingConfig, *, mixed: int, spp: int) -> SimSpec:
    """Prefill and decode in the same batches."""
    return SimSpec(
        profile=load_profile("llama3-8b-a100-tp8"),
        mixed=mixed,
        spp=spp,
        decode_kv_tokens=200_000_000,
        max_batch=4096,
        packing=packing,
        scheduler=config,
    )


#: One system for each paper, as published, and a plain chunked server.
SYSTEMS: Mapping[str, Callable[[Case], SimSpec]] = MappingProxyType(
    {
        "chunked FCFS": lambda case: together(
            in_order(),
            PackingConfig(
                t_target_s=1.0, adaptive=False, fixed_chunk_tokens=2048, multi_prefill=False
            ),
            mixed=2,
            spp=1,
        ),
        "DistServe": lambda case: apart(in_order()),
        "FlowPrefill": lambda case: apart(
            scheduler(policy="s_edf", preemption="operator", batch_tokens=2048, tasks_ahead=1)
        ),
        "Tetris": lambda case: apart(in_order(planner="cdsp", tasks_ahead=64)),
        "Medha": lambda case: together(
            scheduler(policy="lars", preemption="none"),
            PackingConfig(t_target_s=0.05),
            mixed=1,
            spp=2,
        ),
        "Millrace": lambda case: policy("millrace", case),
    }
)


def policy(name: str, case: Case) -> SimSpec:
    """A policy within Millrace's own mechanisms."""
    return apart(
        scheduler(
            policy=name,
            planner="cdsp" if case.grouped else "least_queue",
            preemption="operator",
            batch_tokens=2048,
            tasks_ahead=1,
        ),
        max_chunk_tokens=8192,  # an operator over a million tokens at once takes seconds
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A system's goodput on one case, and the run there; 0 and None when no load was carried."""

    load: float
    report: Report | None
    longest_wait: float  # of any request, in isolated prefills of LEAST_S at least

    def to_json(self) -> dict[str, Any]:
        if self.report is None:
            return {"load": 0.0}
        total = self.report.total
        return {
            "load": self.load,
            "attainment": total.attainment,
            "by_class": {name: one.attainment for name, one in self.report.classes.items()},
            "ttft_p50_s": total.ttft_s.p50,
            "ttft_p99_s": total.ttft_s.p99,
            "longest_wait": self.longest_wait,
        }


def measure(
    jobs: Mapping[tuple[str, str], tuple[Case, SimSpec]], announce: Announce, processes: int = 2
) -> dict[tuple[str, str], Edge]:
    """Finds the edge of each (case, system), side by side in a few processes."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = {key: pool.submit(edge, *job) for key, job in jobs.items()}
        found = {}
        for key, result in running.items():
            found[key] = result.result()
            announce(f"{len(found)} of {len(jobs)} searches: {' / '.join(key)}")
    return found


def edge(case: Case, spec: SimSpec) -> Edge:
    """Finds the goodput by bisection."""
    scenario = Scenario(spec=spec, traffic=case.traffic)
    search = largest_load(case.start, TOLERANCE)
    goal = None if case.every_class else GOAL
    try:
        load = next(search)
        while True:
            report = simulate(scenario.at_load(load), Watch(goal=goal))
            load = search.send(attained(case, report) >= GOAL)
    except StopIteration as done:
        best: float | None = done.value
    if best is None:
        return Edge(load=0.0, report=None, longest_wait=0.0)
    return at(case, spec, best)


def at(case: Case, spec: SimSpec, load: float) -> Edge:
    """Runs a case at a given load."""
    longest = 0.0

    def saw(record: RequestRecord) -> None:
        nonlocal longest
        waited_s = record.queued_s + record.suspended_s
        longest = max(longest, waited_s / max(record.isolated_s, LEAST_S))

    report = simulate(Scenario(spec=spec, traffic=case.traffic).at_load(load), Watch(sink=saw))
    return Edge(load=load, report=report, longest_wait=longest)


def attained(case: Case, report: Report) -> float:
    """Returns the attainment that counts for the case; 0 of a run that was stopped."""
    if report.total.requests < case.traffic.count():
        return 0.0
    if case.every_class:
        return min(one.attainment for one in report.classes.values())
    return report.total.attainment


def panel(results: Mapping[str, Mapping[str, Any]], title: str) -> Panel:
    """Charts each system's goodput on each case as a share of Millrace's, from the results as
    JSON."""
    systems = list(next(iter(results.values())))
    ours = systems[-1]
    lines = {
        system: [
            (number, found[system]["load"] / found[ours]["load"])
            for number, found in enumerate(results.values(), 1)
            if found[ours]["load"]
        ]
        for system in systems
    }
    named = [f"{number} {name}" for number, name in enumerate(results, 1)]
    kinds = "\n".join(", ".join(named[start : start + 3]) for start in range(0, len(named), 3))
    return Panel(title, kinds, f"goodput / {ours}'s", lines)


def compare(
    found: Mapping[str, Case],
    systems: Mapping[str, Callable[[Case], SimSpec]],
    announce: Announce,
    *,
    title: str,
    assumptions: Sequence[str] = (),
) -> Outcome:
    """Computes the goodput of each system on each case; the last of `systems` is ours."""
    edges = measure(
        {
            (name, system): (case, spec(case))
            for name, case in found.items()
            for system, spec in systems.items()
        },
        announce,
    )
    *others, ours = systems
    findings = []
    for name in found:
        loads = {system: edges[name, system].load for system in systems}
        best = max(others, key=lambda system: loads[system])
        ratio = loads[ours] / loads[best] if loads[best] else float("inf")
        said = ", ".join(f"{system} {load:.3g}" for system, load in loads.items())
        findings.append(Finding(f"{name}: {said}", best, f"{ratio:.2f} x it"))
    results = {
        name: {system: edges[name, system].to_json() for system in systems} for name in found
    }
    return Outcome(
        title=title,
        assumptions=(
            *assumptions,
            f"objectives: Table 2 for the Qwen mix, else {SLO_SCALE:g} x the default",
            "Medha mix and mixed: 90 % of every class; other traffic: 90 % of all",
        ),
        findings=findings,
        results=results,
        panels=[[panel(results, "Goodput at 90 % attainment")]],
    )
