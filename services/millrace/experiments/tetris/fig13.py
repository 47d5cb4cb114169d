"""Tetris figure 13: TTFT of single-chunk scheduling (Algorithm 2 alone) over CDSP's, by load.

Beside it Algorithm 2 with the least improvement rate of figures 11 and 12 at any load, to separate
the gain of chunks from the gain of adjusting the rate.
"""

from __future__ import annotations

from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.experiments.tetris.ablation import ablation
from millrace.experiments.tetris.common import (
    ASSUMPTIONS,
    FULL,
    QUICK,
    SINGLE_CHUNK,
    cases,
    scheduler,
    systems,
)

_PAPER = {
    ("8b", "p50"): "2.33-4.17",
    ("8b", "p99"): "2.64-3.58",
    ("70b", "p50"): "2.71-4.77",
    ("70b", "p99"): "2.43-3.23",
}


FIXED = f"{SINGLE_CHUNK}, rate 0.1"


def measure(quick: bool, announce: Announce) -> Outcome:
    """Both at every load, with the same table of improvement rates."""
    found = {
        (key, trace): ablation(
            key,
            testbed,
            trace,
            {
                SINGLE_CHUNK: systems(testbed, trace)[SINGLE_CHUNK],
                FIXED: scheduler(planner="single_chunk", improvement_rate=0.1),
            },
            size=QUICK if quick else FULL,
            announce=announce,
        )
        for key, testbed, trace in cases(quick)
    }
    return Outcome(
        title="Tetris figure 13: slowdown of single-chunk scheduling",
        assumptions=ASSUMPTIONS,
        findings=[
            Finding(
                f"{key}, {trace}: largest {which.upper()} slowdown{of}",
                _PAPER[key, which] if name == SINGLE_CHUNK else "",
                "{1:.2f} at {0:g}/s".format(
                    *max(one.slowdowns(name, which), key=lambda pair: pair[1])
                ),
            )
            for (key, trace), one in found.items()
            for name, of in ((SINGLE_CHUNK, ""), (FIXED, ", rate 0.1"))
            for which in ("p50", "p99")
        ],
        results={", ".join(case): one.to_json() for case, one in found.items()},
        panels=[
            [one.panel(", ".join(case), which) for which in ("p50", "p99")]
            for case, one in found.items()
        ],
    )
