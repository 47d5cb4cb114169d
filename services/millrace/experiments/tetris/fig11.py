"""Tetris figures 11 and 12: fixed improvement rates against the rate looked up by load."""

from __future__ import annotations

from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.experiments.tetris.ablation import Ablation, ablation
from millrace.experiments.tetris.common import ASSUMPTIONS, QUICK, Size, cases, scheduler

RATES = (0.1, 0.3, 0.5, 0.7)
SIZE = Size(duration_s=300.0, stride=2)


def measure(quick: bool, announce: Announce) -> Outcome:
    """Each fixed rate at every load."""
    variants = {
        f"rate {rate:g}": scheduler(planner="cdsp", improvement_rate=rate) for rate in RATES
    }
    found = {
        (key, trace): ablation(
            key, testbed, trace, variants, size=QUICK if quick else SIZE, announce=announce
        )
        for key, testbed, trace in cases(quick)
    }
    return Outcome(
        title="Tetris figures 11, 12: mean TTFT of fixed rates over the dynamic one, by load",
        assumptions=ASSUMPTIONS,
        findings=[f for case, one in found.items() for f in _findings(", ".join(case), one)],
        results={", ".join(case): one.to_json() for case, one in found.items()},
        panels=[
            [one.panel(", ".join(case), which) for which in ("p50", "mean", "p99")]
            for case, one in found.items()
        ],
    )


def _findings(where: str, one: Ablation) -> list[Finding]:
    rows = [
        Finding(
            f"{where}: {name}",
            "",
            " ".join(f"{ratio:.2f}" for _, ratio in one.slowdowns(name, "mean")),
        )
        for name in one.variants
    ]
    best = [
        min(ratios)
        for ratios in zip(
            *([r for _, r in one.slowdowns(name, "mean")] for name in one.variants), strict=True
        )
    ]
    return [
        *rows,
        Finding(f"{where}: best fixed", "about 1", " ".join(f"{ratio:.2f}" for ratio in best)),
    ]
