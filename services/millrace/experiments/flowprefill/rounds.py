"""FlowPrefill section 6.4, "Scheduling cost": rounds, commands and preemptions per request.

Commands are those to the prefill instance. Each request's admission at decode, in which the paper's
prefill scheduler takes no part, is left out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from millrace.experiments.flowprefill import common as fp
from millrace.experiments.outcome import Finding, Outcome, watched
from millrace.sim.results.plots import Panel
from millrace.sim.scenario import simulate

_MODEL = "Llama-3-8B"
RATES_RPS = (1.0, 3.0, 6.0, 9.0, 12.0)

SYSTEMS = {"batching 2K": fp.FLOWPREFILL, "no batching": replace(fp.FLOWPREFILL, batch_tokens=0)}

COUNTERS = ("rounds", "commands", "preemptions")


def measure(size: fp.Size, told: fp.Told) -> Outcome:
    """Counts by rate, each divided by the number of requests."""
    found: dict[str, dict[float, dict[str, float]]] = {}
    for name, system in SYSTEMS.items():
        for rate in RATES_RPS:
            told(f"{name}, {rate:g}/s")
            found.setdefault(name, {})[rate] = counts(system, rate, size)
    most = {
        name: max(by[name] for by_rate in found.values() for by in by_rate.values())
        for name in COUNTERS
    }
    return Outcome(
        title="FlowPrefill section 6.4: scheduling rounds and commands, Llama-3-8B",
        assumptions=(*fp.ASSUMPTIONS, f"at {', '.join(f'{rate:g}' for rate in RATES_RPS)}/s"),
        findings=[
            Finding(what="rounds a request, most", paper="at most 2", ours=f"{most['rounds']:.3f}"),
            Finding(
                what="commands a request (submit, preempt, resume), most",
                paper="fewer than rounds",
                ours=f"{most['commands']:.3f}",
            ),
            Finding(
                what="preemptions a request, most", paper="", ours=f"{most['preemptions']:.3f}"
            ),
        ],
        results=found,
        panels=[
            [
                Panel(
                    title=name,
                    x="request rate (1/s)",
                    y="a request",
                    lines={
                        counter: [(rate, by[counter]) for rate, by in by_rate.items()]
                        for counter in COUNTERS
                    },
                    mark=2.0,
                )
                for name, by_rate in found.items()
            ]
        ],
    )


def counts(system: fp.System, rate_rps: float, size: fp.Size) -> dict[str, float]:
    """Returns the counters of one run, per request."""
    report = simulate(fp.scenario(system, _MODEL, rate_rps, size))
    engine = report.engine
    assert engine is not None  # a run has counters
    each = 1 / report.requests
    return {
        "rounds": engine.rounds * each,
        "commands": engine.commands * each - 1,
        "preemptions": engine.preemptions * each,
    }


def run(console: Console, json_path: Path | None, plot_path: Path | None, quick: bool) -> None:
    """See `papers.Experiment`."""
    size = fp.QUICK if quick else fp.FULL
    watched(console, lambda told: measure(size, told)).publish(console, json_path, plot_path)
