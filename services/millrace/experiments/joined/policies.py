"""Millrace's policy against each of the papers', within the same mechanisms, on all traffic.

Preemption by operator, SLO-aware batching, late binding, and CDSP where prompts are long: only the
order differs. The JSON document also has the longest wait of any request at each policy's goodput.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from millrace.experiments.joined import common as joined
from millrace.experiments.outcome import Announce, Outcome

POLICIES = ("fcfs", "edf", "d_edf", "s_edf", "lrs", "lars", "millrace")


def measure(quick: bool, announce: Announce, folder: Path | None = None) -> Outcome:
    """Compares them. `folder` has the Azure and Mooncake traces; without it, only mixes."""
    return joined.compare(
        joined.cases(folder, quick),
        {name: partial(joined.policy, name) for name in POLICIES},
        announce,
        title="Goodput at 90 % attainment by policy, all else equal (requests/s; traces: scale)",
        best_is="best of the papers: ",
    )
