"""Runs one autoscaler per pool, once per interval, with the scheduler's load. Writes nothing.

An autoscaler remembers some minutes (`core.autoscale.rules`); after a restart it waits for one
window and has them again, so nothing is stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from millrace.core.autoscale.load import PoolLoad
from millrace.core.autoscale.rules import AutoscaleConfig, Autoscaler, PoolMetrics, Recommendation
from millrace_operator.run.load import Sample, Schedulers

#: The share of an interval for which one sample serves all pools of a service.
SHARED = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledPool:
    """The scaler's inputs for a pool."""

    uid: str
    role: str  # prefill | decode | mixed | kvp
    scheduler: str  # host:port
    config: AutoscaleConfig
    interval_s: float
    wanted: int  # its spec.replicas
    quota: int | None  # replicas that the namespace's quotas have room for
    followed: Callable[[PoolLoad], PoolLoad]  # removes the signals that the pool does not follow


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The scaler's results for a pool."""

    metrics: PoolMetrics | None  # None: never measured
    recommendation: Recommendation
    age_s: float  # of the sample; infinite without a sample
    error: str  # why there is no fresh sample, or ""


@dataclass(slots=True, eq=False)
class _Memory:
    autoscaler: Autoscaler
    stepped_s: float
    recommendation: Recommendation
    expected: tuple[int, int]  # sizes of the pool, before and after the recommendation is followed


class Scaler:
    """The autoscalers of all pools."""

    def __init__(
        self, schedulers: Schedulers, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._schedulers = schedulers
        self._clock = clock
        self._pools: dict[str, _Memory] = {}

    async def view(self, pool: ScaledPool) -> View:
        """Returns the pool's load and size. The size is computed once per interval, not in every
        pass.

        If another writer has changed the size, it is computed again at once.
        """
        fresh_s = SHARED * pool.interval_s
        sample = await self._schedulers.load(pool.scheduler, fresh_s=fresh_s)
        metrics = _metrics(pool, sample)
        now_s = self._clock()
        memory = self._pools.get(pool.uid)
        if memory is not None and memory.autoscaler.config != pool.config:
            memory = None
        if (
            memory is None
            or now_s - memory.stepped_s >= fresh_s
            or pool.wanted not in memory.expected
        ):
            autoscaler = memory.autoscaler if memory else Autoscaler(pool.config)
            recommendation = autoscaler.step(metrics, now_s)
            if sample.load is None:
                recommendation = replace(recommendation, reason="no metrics yet")
            expected = (pool.wanted, recommendation.replicas)
            memory = self._pools[pool.uid] = _Memory(autoscaler, now_s, recommendation, expected)
        return View(
            metrics=None if sample.load is None else metrics,
            recommendation=memory.recommendation,
            age_s=now_s - sample.sampled_s,
            error=sample.error,
        )

    def forget(self, uid: str) -> None:
        """Forgets a deleted pool."""
        self._pools.pop(uid, None)


def _metrics(pool: ScaledPool, sample: Sample) -> PoolMetrics:
    """Returns the sample for the autoscaler; without a measurement it is infinitely old."""
    load = PoolLoad(role=pool.role) if sample.load is None else sample.load.of(pool.role)
    return pool.followed(load).metrics(
        sampled_s=sample.sampled_s if sample.load else -math.inf,
        parked_requests=sample.load.parked_requests if sample.load else 0,
        size=pool.wanted,
        quota=pool.quota,
    )
