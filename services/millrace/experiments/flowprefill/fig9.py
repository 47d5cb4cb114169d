"""FlowPrefill figure 9: attainment by request rate and by SLO scale, goodput at 90 %.

Beyond an instance's capacity, S-EDF gives long requests up, and those that had begun keep their KV
pages: in the end none are free for requests that could be in time. A system with ten times the
memory shows how far this limits FlowPrefill. The baselines' goodput lies below that.
"""

from __future__ import annotations

from dataclasses import replace

from millrace.experiments.flowprefill import common as fp
from millrace.experiments.outcome import Announce, Finding, Outcome

_OURS = "FlowPrefill"

SYSTEMS = {
    _OURS: fp.FLOWPREFILL,
    "DistServe": fp.DISTSERVE,
    "DistServe-CP2K": fp.CP2K,
    "DistServe-CP8K": fp.CP8K,
    "FlowPrefill, 10 x KV": replace(fp.FLOWPREFILL, kv_tokens=4_000_000),
}

#: Fixed rate of the SLO axis, which the paper does not name: about 40 % of one instance's capacity.
RATES_RPS = {"Llama-3-8B": 3.0, "Llama-3-70B": 1.2}

_RATIOS = {
    ("rate", "DistServe"): "4.7-5.6",
    ("rate", "DistServe-CP2K"): "up to 2.0",
    ("rate", "DistServe-CP8K"): "up to 4.5",
    ("slo-scale", "DistServe-CP2K"): "1.5-2.3",
    ("slo-scale", "DistServe-CP8K"): "2.1-3.1",
}


def measure(quick: bool, announce: Announce) -> Outcome:
    """Both rows of the figure for each model."""
    size = fp.size_of(quick)
    found: dict[str, dict[str, fp.Comparison]] = {}
    for model in fp.MODELS:
        rate = RATES_RPS[model]
        rates = [rate * step for step in (0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4)]
        scales = (0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0)
        one = replace(size, seeds=1)
        found[model] = {
            "rate": fp.compare(SYSTEMS, model, "rate", rate, size, announce, points=rates),
            "slo-scale": fp.compare(
                SYSTEMS, model, "slo-scale", rate, one, announce, points=scales
            ),
        }
    return Outcome(
        title="FlowPrefill figure 9: TTFT attainment by request rate and SLO scale",
        assumptions=(*fp.ASSUMPTIONS, f"fixed rates of the SLO axis: {RATES_RPS}"),
        findings=[*_goodputs(found), *_ratios(found)],
        results={
            model: {axis: one.to_json() for axis, one in by_axis.items()}
            for model, by_axis in found.items()
        },
        panels=[[axis.panel(model) for axis in by.values()] for model, by in found.items()],
    )


def _goodputs(found: dict[str, dict[str, fp.Comparison]]) -> list[Finding]:
    return [
        Finding(f"{model}: goodput of {name} (1/s)", "", f"{edge.median:.2f}")
        for model, by_axis in found.items()
        for name, edge in by_axis["rate"].edges.items()
    ]


def _ratios(found: dict[str, dict[str, fp.Comparison]]) -> list[Finding]:
    words = {"rate": "times the goodput of", "slo-scale": "times tighter objectives than"}
    return [
        Finding(
            f"{model}: {words[axis]} {other}", paper, f"{by_axis[axis].ratio(_OURS, other):.2f}"
        )
        for model, by_axis in found.items()
        for (axis, other), paper in _RATIOS.items()
    ]
