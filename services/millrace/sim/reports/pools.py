"""What the pools of a run were loaded with, and what sizes they should have had.

The load is sampled as autoscaling reads it (`core.autoscale`), and each sample is held against the
targets of autoscaling: the size that they ask for, without windows and limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from millrace.core.autoscale.load import FleetLoad, PoolLoad
from millrace.core.autoscale.rules import (
    AutoscaleConfig,
    DecodeTargets,
    PrefillTargets,
    Targets,
    Wish,
)
from millrace.sim.reports.report import PoolRow

_TARGETS: Final[Mapping[str, tuple[Targets, ...]]] = {
    "prefill": (PrefillTargets(),),
    "decode": (DecodeTargets(),),
    "mixed": (PrefillTargets(), DecodeTargets()),
}
#: No limit of a size: what is asked for is the question.
_MOST: Final = 1 << 20
_BUSY: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    instances: int
    in_use: float | None
    wish: Wish | None


class PoolSamples:
    """Collects samples at equal distances of time."""

    def __init__(self) -> None:
        self._samples: dict[str, list[_Sample]] = {}

    def add(self, load: FleetLoad, now_s: float) -> None:
        for role, targets in _TARGETS.items():
            pool = load.pools.get(role)
            if pool is not None and pool.ready:
                self._samples.setdefault(role, []).append(_sample(pool, targets, now_s))

    def rows(self) -> list[PoolRow]:
        """Returns a row of each pool that had instances."""
        return [_row(role, samples) for role, samples in self._samples.items()]


def _sample(pool: PoolLoad, targets: tuple[Targets, ...], now_s: float) -> _Sample:
    config = AutoscaleConfig(targets=targets, max_replicas=_MOST)
    metrics = pool.metrics(sampled_s=now_s, parked_requests=0, size=pool.ready)
    wishes = [wish for one in targets for wish in one.wishes(metrics, config)]
    arriving = None if pool.arriving is None else pool.arriving / pool.ready
    measured = [share for share in (arriving, pool.kv_utilisation) if share is not None]
    return _Sample(
        instances=pool.ready,
        in_use=max(measured, default=None),
        wish=max(wishes, key=lambda wish: wish.replicas, default=None),
    )


def _row(role: str, samples: list[_Sample]) -> PoolRow:
    sizes = sorted(one.instances for one in samples)
    in_use = sorted(one.in_use for one in samples if one.in_use is not None)
    wishes = [one.wish for one in samples if one.wish is not None]
    wanted = sorted(max(1, wish.replicas) for wish in wishes) or sizes
    worst = max(wishes, key=lambda wish: wish.replicas, default=None)
    instances, needed = sizes[len(sizes) // 2], wanted[_at(_BUSY, wanted)]
    return PoolRow(
        role=role,
        instances=instances,
        in_use_mean=sum(in_use) / len(in_use) if in_use else None,
        in_use_p95=in_use[_at(_BUSY, in_use)] if in_use else None,
        wanted=needed,
        wanted_most=wanted[-1],
        reason="" if worst is None else worst.reason,
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
