"""FlowPrefill figure 11: token budgets of SLO-aware batching, attainment and throughput.

Attainment at fixed rates, every budget on the same draws. The differences between budgets are
smaller than those between draws, so they are taken draw by draw, with their standard error.
Throughput is that of one prefill instance that never runs dry: at a rate far beyond its capacity.
Objectives are ten times as loose there, so that deadlines leave batches room to fill the budget.
The gain is bounded by how much faster a GPU computes many tokens at once, hence the two costs of a
forward pass: as profiled, and as in the paper's public code.

Memory is ample, so that systems differ in budgets alone: requests that S-EDF gives up keep their KV
pages, and under overload the pool of a real GPU fills with them. With a task held ahead more
requests reach the instance before they are given up; one system shows that cost with the memory of
the GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from millrace.experiments.flowprefill import common as fp
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.results.plots import Panel
from millrace.sim.scenario import simulate

_MODEL = "Llama-3-8B"
RATES_RPS = (6.0, 8.0, 10.0)
_FLOOD_RPS = 20.0  # three times the instance's capacity
_FLOOD_SLO_SCALE = 10.0
_NONE = "none"

_KV_TOKENS = 4_000_000  # ten times the GPU's memory: see above
_BATCHING = replace(fp.FLOWPREFILL, kv_tokens=_KV_TOKENS)

SYSTEMS = {
    _NONE: replace(_BATCHING, batch_tokens=0),
    "2K": _BATCHING,
    "4K": replace(_BATCHING, batch_tokens=4096),
    "8K": replace(_BATCHING, batch_tokens=8192),
    "2K, one held ahead": replace(_BATCHING, tasks_ahead=2),
    "2K, one held ahead, 80 GB": replace(fp.FLOWPREFILL, tasks_ahead=2),
}

#: Rate -> system -> attainment of each draw.
Draws = Mapping[float, Mapping[str, Sequence[float]]]


def measure(quick: bool, announce: Announce) -> Outcome:
    """Attainment by rate and throughput, by budget and cost of a pass."""
    size = fp.size_of(quick)
    size = replace(size, requests=size.requests // 2, seeds=2 * size.seeds)
    draws: dict[str, Draws] = {}
    floods: dict[str, dict[str, fp.Load]] = {}
    for label, pass_s in fp.PASSES.items():
        systems = {name: replace(one, pass_s=pass_s) for name, one in SYSTEMS.items()}
        announce(label)
        draws[label] = {
            rate: {name: attainments(one, rate, size) for name, one in systems.items()}
            for rate in RATES_RPS
        }
        floods[label] = {name: flood(one, size) for name, one in systems.items()}
    return Outcome(
        title="FlowPrefill figure 11: batching budgets, Llama-3-8B",
        assumptions=(*fp.ASSUMPTIONS, fp.PASSES_ASSUMPTION),
        findings=_findings(draws, floods),
        results={
            label: {
                "attainment": {f"{rate:g}": by_name for rate, by_name in draws[label].items()},
                "throughput": {name: one.to_json() for name, one in floods[label].items()},
            }
            for label in fp.PASSES
        },
        panels=[
            [
                Panel(
                    f"attainment, {label}",
                    "request rate (1/s)",
                    "TTFT attainment (%)",
                    {
                        name: [
                            (rate, 100 * statistics.mean(by_name[name]))
                            for rate, by_name in draws[label].items()
                        ]
                        for name in SYSTEMS
                    },
                )
                for label in fp.PASSES
            ],
            [
                Panel(
                    "throughput without end of work",
                    "budget (tokens)",
                    "requests/s",
                    {
                        label: [
                            (one.batch_tokens, by_name[name].requests_per_s)
                            for name, one in SYSTEMS.items()
                            if one.tasks_ahead == 1
                        ]
                        for label, by_name in floods.items()
                    },
                )
            ],
        ],
    )


def attainments(system: fp.System, rate_rps: float, size: fp.Size) -> list[float]:
    """Returns the attainment of each draw."""
    return [
        simulate(fp.scenario(system, _MODEL, rate_rps, size, seed=seed)).total.attainment
        for seed in range(size.seeds)
    ]


def flood(system: fp.System, size: fp.Size) -> fp.Load:
    """Runs more requests than can be served."""
    of = fp.scenario(system, _MODEL, _FLOOD_RPS, size)
    return fp.load(of.at_slo_scale(_FLOOD_SLO_SCALE))


def _findings(
    draws: Mapping[str, Draws], floods: Mapping[str, Mapping[str, fp.Load]]
) -> list[Finding]:
    rows: list[Finding] = []
    for label, by_rate in draws.items():
        none_rps = floods[label][_NONE].requests_per_s
        for name, flooded in floods[label].items():
            gain = flooded.requests_per_s / none_rps - 1
            rows.append(
                Finding(
                    f"{label}, budget {name}: throughput (1/s), passes a request",
                    "" if name == _NONE else "more than none",
                    f"{flooded.requests_per_s:.2f} ({gain:+.1%}), {flooded.passes_per_request:.2f}",
                )
            )
        for rate, by_name in by_rate.items():
            rows += [
                Finding(
                    f"{label}, budget {name} at {rate:g}/s: attainment, less that of none",
                    "" if name == _NONE else "more than none",
                    _less(by_name[name], by_name[_NONE]),
                )
                for name in SYSTEMS
            ]
    return rows


def _less(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Returns the mean, and the mean difference with its standard error in points, draw by draw."""
    gaps = [100 * (one - other) for one, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5
    return f"{statistics.mean(ours):.1%} ({statistics.mean(gaps):+.2f} +- {error:.2f})"
