"""One autoscaler a pool, asked once an interval with the scheduler's load. Nothing is written here.

An autoscaler remembers some minutes (`core.autoscale.rules`); after a restart it finds them again
by waiting a window, so nothing of it is stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from millrace.core.autoscale.load import PoolLoad
from millrace.core.autoscale.rules import AutoscaleConfig, Autoscaler, PoolMetrics, Recommendation
from millrace_operator.run.load import Sample, Schedulers

#: A sample serves all pools of a service that ask within this share of an interval.
SHARED = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What the scaler has to know of a pool."""

    uid: str
    role: str  # prefill | decode | mixed | kvp
    scheduler: str  # host:port
    config: AutoscaleConfig
    interval_s: float
    wanted: int  # its spec.replicas
    quota: int | None  # replicas that the namespace's quotas have room for
    heard: Callable[[PoolLoad], PoolLoad]  # takes away the signals that it does not follow


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the scaler says of a pool."""

    metrics: PoolMetrics | None  # None: never measured
    recommendation: Recommendation
    age_s: float  # of the sample; infinite without one
    error: str  # why there is no fresh sample, or ""


@dataclass(slots=True, eq=False)
class _Memory:
    autoscaler: Autoscaler
    stepped_s: float
    recommendation: Recommendation
    expected: tuple[int, int]  # sizes of the pool, before the recommendation is followed and after


class Scaler:
    """All pools of the operator."""

    def __init__(
        self, schedulers: Schedulers, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._schedulers = schedulers
        self._clock = clock
        self._pools: dict[str, _Memory] = {}

    async def look(self, pool: Pool) -> View:
        """The pool's load and size. The size is thought over once an interval, not at every look.

        A size that somebody else has changed meanwhile is thought over at once.
        """
        fresh_s = SHARED * pool.interval_s
        sample = await self._schedulers.load(pool.scheduler, fresh_s=fresh_s)
        metrics = _metrics(pool, sample)
        now_s = self._clock()
        memory = self._pools.get(pool.uid)
        if memory is None or memory.autoscaler.config != pool.config:
            autoscaler = Autoscaler(pool.config)
        elif now_s - memory.stepped_s < fresh_s and pool.wanted in memory.expected:
            return self._view(sample, metrics, memory.recommendation, now_s)
        else:
            autoscaler = memory.autoscaler
        recommendation = autoscaler.step(metrics, now_s)
        if sample.load is None:
            recommendation = replace(recommendation, reason="no metrics yet")
        expected = (pool.wanted, recommendation.replicas)
        self._pools[pool.uid] = _Memory(autoscaler, now_s, recommendation, expected)
        return self._view(sample, metrics, recommendation, now_s)

    def forget(self, uid: str) -> None:
        """A pool that is gone."""
        self._pools.pop(uid, None)

    @staticmethod
    def _view(
        sample: Sample, metrics: PoolMetrics, recommendation: Recommendation, now_s: float
    ) -> View:
        return View(
            metrics=None if sample.load is None else metrics,
            recommendation=recommendation,
            age_s=now_s - sample.sampled_s,
            error=sample.error,
        )


def _metrics(pool: Pool, sample: Sample) -> PoolMetrics:
    """The sample as the autoscaler takes it; one that was never measured is infinitely old."""
    told = PoolLoad(role=pool.role) if sample.load is None else sample.load.of(pool.role)
    return pool.heard(told).metrics(
        sampled_s=sample.sampled_s if sample.load else -math.inf,
        parked_requests=sample.load.parked_requests if sample.load else 0,
        size=pool.wanted,
        quota=pool.quota,
    )
