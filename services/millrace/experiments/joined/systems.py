"""Millrace against each paper's system alone and a plain chunked server, on all traffic."""

from __future__ import annotations

from pathlib import Path

from millrace.experiments.joined import common as joined
from millrace.experiments.outcome import Announce, Outcome


def measure(quick: bool, announce: Announce, trace: Path | None = None) -> Outcome:
    """Compares them. `trace`: folder of the Azure and Mooncake traces; without it, only mixes."""
    return joined.compare(
        joined.cases(trace, quick),
        joined.SYSTEMS,
        announce,
        title="Goodput at 90 % attainment by system (requests/s; traces: scale of their times)",
        assumptions=["16 A100s each: 8 for prefill and 8 for decode, or all for both"],
    )
