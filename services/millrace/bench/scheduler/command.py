"""The options of `millrace bench scheduler`: the cost of an event. `run.py` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.bench.common.options import command as made
from millrace.bench.common.options import option, read_names, read_numbers
from millrace.core.priority import POLICIES

#: Objectives of the requests, see `run.py`.
OBJECTIVES = ("tight", "loose", "half", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Each policy is measured at 8 instances with tight objectives, the default in every case."""

    waiting: int = option(10_000, "--waiting", min=100, help="Requests that wait.")
    events: int = option(3_000, "--events", min=100, help="Events that are measured, each case.")
    settling: int = option(2_000, "--settling", min=0, help="Events before these, each case.")
    prefill: Sequence[int] = option(
        (2, 8, 50, 200), "--prefill", read=read_numbers(), help="Prefill instances."
    )
    policies: Sequence[str] = option(
        tuple(POLICIES), "--policies", read=read_names(*POLICIES), help="Orders."
    )
    seed: int = option(1, "--seed", help="Of the requests.")

    def quick(self) -> Settings:
        """Returns less of everything."""
        return replace(self, waiting=300, events=300, settling=100, prefill=(2, 8))


command = made(
    Settings,
    "Cost of an event to the scheduler while very many requests wait.",
    quick="A look, no figures to quote: less of everything.",
)
