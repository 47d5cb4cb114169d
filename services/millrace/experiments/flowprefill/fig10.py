"""FlowPrefill figure 10: EDF, D-EDF and S-EDF under operator-level preemption and batching."""

from __future__ import annotations

from dataclasses import replace

from millrace.experiments.flowprefill import common as fp
from millrace.experiments.outcome import Announce, Finding, Outcome

_MODEL = "Llama-3-8B"  # as in all of the paper's ablations
_RATE_RPS = 5.0  # of the SLO axis: two thirds of what one instance can do, so that some are late

SYSTEMS = {
    name: replace(fp.FLOWPREFILL, policy=policy)
    for name, policy in (("S-EDF", "s_edf"), ("D-EDF", "d_edf"), ("EDF", "edf"))
}


def measure(quick: bool, announce: Announce) -> Outcome:
    """Both sides of the figure."""
    size = fp.size_of(quick)
    size = replace(size, seeds=1)
    rates = (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0)
    scales = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
    by_rate = fp.compare(SYSTEMS, _MODEL, "rate", _RATE_RPS, size, announce, points=rates)
    by_scale = fp.compare(SYSTEMS, _MODEL, "slo-scale", _RATE_RPS, size, announce, points=scales)
    findings = [
        Finding(what.format(name), "", f"{edge.median:.2f}")
        for what, found in (
            ("goodput of {} (1/s)", by_rate),
            ("smallest SLO scale of {} at " + f"{_RATE_RPS:g}/s", by_scale),
        )
        for name, edge in found.edges.items()
    ]
    return Outcome(
        title="FlowPrefill figure 10: scheduling policies, Llama-3-8B",
        assumptions=fp.ASSUMPTIONS,
        findings=[
            Finding(
                "order of goodput",
                "S-EDF > D-EDF > EDF",
                " > ".join(
                    sorted(SYSTEMS, key=lambda name: by_rate.edges[name].median, reverse=True)
                ),
            ),
            *findings,
        ],
        results={"rate": by_rate.to_json(), "slo-scale": by_scale.to_json()},
        panels=[[by_rate.panel("by rate"), by_scale.panel(f"by SLO scale, at {_RATE_RPS:g}/s")]],
    )
