"""The options of `millrace bench planner`: the cost of a plan. `run.py` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.bench.common.options import command as made
from millrace.bench.common.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Lengths are uniform within `tokens`, each queue time within 0 to `queue_s` seconds."""

    max_sp: Sequence[int] = (8, 16, 32, 64, 128)
    trials: int = option(1000, "--trials", min=1, help="Plans a pool.")
    passes: int = option(5, "--passes", min=1, help="Times each is repeated.")
    tokens: tuple[int, int] = (4 * 1024, 190 * 1024)
    queue_s: float = option(1.0, "--queue-s", min=0.0, help="Longest queue time, seconds.")
    improvement_rate: float = option(0.05, "--improvement-rate", min=0.0, max=1.0)
    seed: int = option(0, "--seed", help="Of the trials.")


command = made(
    Settings,
    "Cost of one CDSP plan for pools of 8 to 128 instances (Tetris Table 2).",
    plot="Write the bars as a PNG.",
)
