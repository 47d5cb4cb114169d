"""The options of `millrace bench gpu`: checks and speed on a GPU. `run.py` runs the parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.bench.common.options import command as made
from millrace.bench.common.options import option, read_names

LIMITS_S = {
    "kernels": 80.0,
    "oracle": 55.0,
    "decode": 90.0,
    "preemption": 30.0,
    "transfer": 30.0,
    "tensor-parallel": 30.0,
    "stages": 30.0,
    "stack": 40.0,
    "traffic": 95.0,
    "speed": 70.0,
    "speed-moe": 45.0,
}
"""The parts in their order, and the most seconds of each: together less than 10 minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checks. `source`: a source tree; tests of the kernels and the toy model lie there."""

    parts: Sequence[str] = option(
        tuple(LIMITS_S), "--parts", read=read_names(*LIMITS_S), help=f"Of {', '.join(LIMITS_S)}."
    )
    device: str = option("cuda", "--device", help="cuda, or cpu: the same code, small sizes.")
    source: str = option(".", "--source", help="A source tree.")
    limit_s: float = option(
        590.0, "--limit-s", min=1.0, help="Seconds on a GPU; parts without time left are skipped."
    )


command = made(
    Settings, "Checks the engine on a GPU and measures it beside a roofline; parts run alone."
)
