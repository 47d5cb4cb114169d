"""FlowPrefill figure 14: one objective for all, prompts of at most 2k tokens: is anything lost?

500 requests with ShareGPT's lengths, as in the paper. With chunks of 2,048 tokens nothing is ever
cut and with one objective the order is that of arrival. DistServe-CP2K is run twice: with prompts
one by one, as in the other experiments, and filling its 2,048 tokens with several prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from millrace.experiments.flowprefill import common as fp
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.results.plots import Panel

_MODEL = "Llama-3-8B"
_MIX = "sharegpt-2k"
REQUESTS = 500
RATES_RPS = (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0)

_OURS, _BATCHED = "FlowPrefill", "DistServe-CP2K, batching"
SYSTEMS = {
    _OURS: fp.FLOWPREFILL,
    "DistServe-CP2K": fp.CP2K,
    _BATCHED: replace(fp.CP2K, batch_tokens=2048),
}


def measure(quick: bool, announce: Announce) -> Outcome:
    """Attainment and throughput by rate."""
    size = replace(fp.size_of(quick), requests=REQUESTS)

    def load(system: fp.System, rate_rps: float) -> fp.Load:
        return fp.load(fp.scenario(system, _MODEL, rate_rps, size, mix=_MIX))

    found = fp.by_rate(SYSTEMS, RATES_RPS, announce, load)
    findings = [
        Finding(
            f"throughput of FlowPrefill over that of {other}, least and most over the rates",
            "comparable",
            "{:.3f}-{:.3f}".format(*_extremes(found[_OURS], found[other])),
        )
        for other in SYSTEMS
        if other != _OURS
    ]
    findings += [
        Finding(
            f"attainment at 8, 10 and 12/s: {name}",
            "FlowPrefill ahead",
            ", ".join(f"{by_rate[rate].attainment:.1%}" for rate in (8.0, 10.0, 12.0)),
        )
        for name, by_rate in found.items()
    ]
    return Outcome(
        title="FlowPrefill figure 14: a single objective, Llama-3-8B",
        assumptions=(
            "synthetic: ShareGPT's lengths by quantiles, Poisson arrivals",
            *fp.ASSUMPTIONS[1:],
        ),
        findings=findings,
        results={
            name: {f"{rate:g}": one.to_json() for rate, one in by_rate.items()}
            for name, by_rate in found.items()
        },
        panels=[
            [
                Panel(
                    title,
                    "request rate (1/s)",
                    label,
                    {
                        name: [(rate, factor * getattr(one, field)) for rate, one in by.items()]
                        for name, by in found.items()
                    },
                )
                for title, label, field, factor in (
                    ("attainment", "TTFT attainment (%)", "attainment", 100.0),
                    ("throughput", "prefilled requests/s", "requests_per_s", 1.0),
                )
            ]
        ],
    )


def _extremes(
    ours: Mapping[float, fp.Load], theirs: Mapping[float, fp.Load]
) -> tuple[float, float]:
    ratios = [ours[rate].requests_per_s / theirs[rate].requests_per_s for rate in RATES_RPS]
    return min(ratios), max(ratios)
