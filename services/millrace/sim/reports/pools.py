"""What the pools of a run were loaded with, and what sizes they should have had."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from millrace.core.report.pool_sample import PoolSample
from millrace.sim.reports.report import PoolRow

_BUSY: Final = 0.95


def pool_rows(samples: Iterable[PoolSample]) -> list[PoolRow]:
    """Returns a row of each pool; its samples are at equal distances of time."""
    by_role: dict[str, list[PoolSample]] = {}
    for sample in samples:
        by_role.setdefault(sample.role, []).append(sample)
    return [_row(role, found) for role, found in by_role.items()]


def _row(role: str, samples: list[PoolSample]) -> PoolRow:
    sizes = sorted(one.instances for one in samples)
    in_use = sorted(one.in_use for one in samples if one.in_use is not None)
    wishes = [(one.wanted, one.reason) for one in samples if one.wanted is not None]
    wanted = sorted(max(1, size) for size, _ in wishes) or sizes
    instances, needed = sizes[len(sizes) // 2], wanted[_at(_BUSY, wanted)]
    return PoolRow(
        role=role,
        instances=instances,
        in_use_mean=sum(in_use) / len(in_use) if in_use else None,
        in_use_p95=in_use[_at(_BUSY, in_use)] if in_use else None,
        wanted=needed,
        wanted_most=wanted[-1],
        reason=max(wishes, key=lambda wish: wish[0])[1] if wishes else "",
        advice=_advice(instances, needed),
    )


def _at(share: float, values: list[float] | list[int]) -> int:
    """The index of a quantile, by nearest rank."""
    return max(0, math.ceil(share * len(values)) - 1)


def _advice(instances: int, wanted: int) -> str:
    if wanted > instances:
        return f"grow it by {wanted - instances}"
    if wanted < instances:
        return f"{instances - wanted} fewer would do"
    return "keep it"
