"""FlowPrefill section 6.4, "Scheduling cost": rounds, commands and preemptions per request.

Commands are those to the prefill instance. Each request's admission at decode, in which the paper's
prefill scheduler takes no part, is left out.
"""

from __future__ import annotations

from dataclasses import replace

from millrace.experiments.flowprefill import common as fp
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.results.plots import Panel
from millrace.sim.scenario import simulate

_MODEL = "Llama-3-8B"
RATES_RPS = (1.0, 3.0, 6.0, 9.0, 12.0)

SYSTEMS = {"batching 2K": fp.FLOWPREFILL, "no batching": replace(fp.FLOWPREFILL, batch_tokens=0)}

COUNTERS = ("rounds", "commands", "preemptions")


def measure(quick: bool, announce: Announce) -> Outcome:
    """Counts by rate, each divided by the number of requests."""
    size = fp.size_of(quick)
    found = fp.by_rate(SYSTEMS, RATES_RPS, announce, lambda one, rate: counts(one, rate, size))
    most = {
        name: max(by[name] for by_rate in found.values() for by in by_rate.values())
        for name in COUNTERS
    }
    return Outcome(
        title="FlowPrefill section 6.4: scheduling rounds and commands, Llama-3-8B",
        assumptions=(*fp.ASSUMPTIONS, f"at {', '.join(f'{rate:g}' for rate in RATES_RPS)}/s"),
        findings=[
            Finding("rounds a request, most", "at most 2", f"{most['rounds']:.3f}"),
            Finding(
                "commands a request (submit, preempt, resume), most",
                "fewer than rounds",
                f"{most['commands']:.3f}",
            ),
            Finding("preemptions a request, most", "", f"{most['preemptions']:.3f}"),
        ],
        results=found,
        panels=[
            [
                Panel(
                    name,
                    "request rate (1/s)",
                    "a request",
                    {
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
