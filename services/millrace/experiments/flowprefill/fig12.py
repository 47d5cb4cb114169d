"""FlowPrefill figure 12: preemption blocking time at operator, layer and chunk boundaries.

Blocking time lasts from the signal to stop until the task has stopped. Where signals fall anywhere
in a layer with equal chance, the mean is sum(t^2) / (2 sum(t)) over the boundaries' distances t: a
pass's operators alone determine the ratio, which is computed beside the results of the runs.

One task is held ahead at the instance, so that the next task starts without a message from the
scheduler when a task ends. With none held ahead a suspended task continues for the moment that the
scheduler needs to send the more urgent task, and yields again at once: such signals all fall on the
start of a layer. Those means are given too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from millrace.core.cost.operators import BatchShape
from millrace.experiments.flowprefill import common as fp
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.results.histogram import Distribution
from millrace.sim.results.plots import Panel
from millrace.sim.scenario import simulate

BOUNDARIES = ("operator", "layer", "chunk")
LENGTHS = (1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768)

#: Requests/s: a load that each model carries with its objectives.
RATES_RPS = {"Llama-3-8B": (3.0, 6.0), "Llama-3-70B": (1.2, 2.4)}

#: (boundary, tasks an instance holds) -> seconds from signal to stop.
Blocking = Mapping[tuple[str, int], Distribution]


def measure(quick: bool, announce: Announce) -> Outcome:
    """Blocking times of both models at two rates, and ratios by length."""
    size = fp.size_of(quick)
    found: dict[str, Blocking] = {}
    for model, rates in RATES_RPS.items():
        for rate in rates:
            at = f"{model} at {rate:g}/s"
            announce(at)
            found[at] = {
                (boundary, ahead): blocking(model, boundary, rate, size, ahead)
                for ahead in (2, 1)
                for boundary in BOUNDARIES
            }
    expected = {model: {n: expected_ratio(model, n) for n in LENGTHS} for model in RATES_RPS}
    return Outcome(
        title="FlowPrefill figure 12: blocking time by preemption boundary",
        assumptions=(
            *fp.ASSUMPTIONS,
            "no profile for Qwen2.5-14B; chunk: a whole prompt, since these aren't cut",
        ),
        findings=[row for at, one in found.items() for row in _rows(at, one)]
        + [
            Finding(
                f"{model}: layer / operator by a pass's operators, 1k to 32k tokens",
                "3.5-4.2",
                f"{min(ratios.values()):.2f}-{max(ratios.values()):.2f}",
            )
            for model, ratios in expected.items()
        ],
        results={
            "blocking_ms": {
                at: {
                    f"{boundary}, {ahead - 1} held ahead": _ms(one)
                    for (boundary, ahead), one in by.items()
                }
                for at, by in found.items()
            },
            "expected_ratio_by_tokens": expected,
        },
        panels=[
            [
                Panel(
                    model,
                    "request rate (1/s)",
                    "mean blocking time (ms)",
                    {
                        boundary: [
                            (rate, 1e3 * found[f"{model} at {rate:g}/s"][boundary, 2].mean)
                            for rate in rates
                        ]
                        for boundary in BOUNDARIES[:2]
                    },
                )
                for model, rates in RATES_RPS.items()
            ]
        ],
    )


def blocking(
    model: str, boundary: str, rate_rps: float, size: fp.Size, tasks_ahead: int = 2
) -> Distribution:
    """Returns the seconds from signal to stop of one run."""
    system = replace(fp.FLOWPREFILL, preemption=boundary, tasks_ahead=tasks_ahead)
    engine = simulate(fp.scenario(system, model, rate_rps, size)).engine
    assert engine is not None  # a run has counters
    return engine.blocking_s


def expected_ratio(model: str, tokens: int) -> float:
    """Returns mean blocking of layer over operator boundaries, signals evenly spread over a
    pass."""
    operators = fp.operator_profile(fp.MODELS[model]).operators
    seconds = operators.layer_s(BatchShape(prefills=((tokens, 0),)))
    return sum(seconds) ** 2 / sum(one * one for one in seconds)


def _rows(at: str, by: Blocking) -> list[Finding]:
    operator, layer = by["operator", 2], by["layer", 2]
    return [
        Finding(
            f"{at}: mean blocking, operator / layer / chunk (ms)",
            "all below 4.5 (operator)",
            " / ".join(f"{1e3 * by[boundary, 2].mean:.2f}" for boundary in BOUNDARIES),
        ),
        Finding(f"{at}: longest blocking at operators (ms)", "4.5", f"{1e3 * operator.max:.2f}"),
        Finding(
            f"{at}: layer / operator, means (none held ahead)",
            "3.5-4.2",
            f"{layer.mean / operator.mean:.2f} "
            f"({by['layer', 1].mean / by['operator', 1].mean:.2f})",
        ),
    ]


def _ms(found: Distribution) -> dict[str, float]:
    return {
        "count": found.count,
        "mean": 1e3 * found.mean,
        "p50": 1e3 * found.p50,
        "p99": 1e3 * found.p99,
        "max": 1e3 * found.max,
    }
