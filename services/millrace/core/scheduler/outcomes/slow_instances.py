"""Keeps new prompts from prefill instances that lag behind their pool.

A chunk's *lag* is its seconds over those that the pool's corrected latency model expects of any of
its instances. An instance is slow when the median lag of its last three chunks reaches
`scheduler.slow_factor`, or as soon as a chunk that it computes has taken so many times as long as
expected: a stopped or very slow process finishes none.

A slow instance finishes what it has and gets no new prompt for a pause. Then it gets one, as a
probe. After a probe that lags the pause is twice as long; after a probe in time the next one
follows at once. It is slow no more when the median is below the factor again.

Only chunks of one instance count: which member delays a group is not known. If more than half of a
pool's instances lag, the model is wrong and not they: then all get work.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from millrace.core.backoff import Backoff
from millrace.core.config import SchedulerConfig
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.core.scheduler.fleet.instances import PrefillInstance
from millrace.core.scheduler.fleet.pool import Pool
from millrace.core.scheduler.fleet.task import Task

#: Chunks that the median is of.
LAST: Final = 3
#: Seconds that are added to what is expected: the lag of a tiny chunk tells nothing.
FLOOR_S: Final = 0.02
#: The longest pause, in first pauses.
MOST_PAUSES: Final = 32


@dataclass(slots=True)
class _Pace:
    lags: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    until_s: float | None = None  # the end of the pause, while it is slow
    pauses: int = 0


class SlowInstances:
    """The slow prefill instances of a cluster."""

    def __init__(self, config: SchedulerConfig, cluster: Cluster) -> None:
        self._factor = config.slow_factor
        first_s = config.breaker_pause_s
        self._backoff = Backoff(first_s, MOST_PAUSES * first_s, spread=0.0)
        self._cluster = cluster
        self._paces: dict[str, _Pace] = {}
        self._behind: set[str] = set()  # by their last chunks
        self._overdue: set[str] = set()  # they compute chunks that should have ended long ago
        self._now_s = 0.0

    def names(self) -> set[str]:
        """Returns the slow instances, those of pools whose most instances lag left out."""
        lagging = self._overdue | self._behind
        found: set[str] = set()
        for pool in {self._cluster.pool_of(self._cluster.instances[name]) for name in lagging}:
            here = lagging & pool.prefill.keys()
            if 2 * len(here) <= len(pool.prefill):
                found |= here
        return found

    def closed(self) -> set[str]:
        """Returns the instances that get no new prompt now: they pause, or compute their probe."""
        return {name for name in self.names() if self._is_closed(name)}

    def state(self, instance_id: str) -> str:
        """Returns the state of an instance, as of a breaker: closed | open | half_open."""
        if instance_id not in self.names():
            return "closed"
        return "open" if self._is_closed(instance_id) else "half_open"

    def took(self, task: Task, pool: Pool, seconds: float, now_s: float) -> None:
        """Takes in a finished chunk. `seconds`: of computing."""
        if not self._factor or len(task.members) > 1:
            return
        pace = self._paces.setdefault(task.members[0].id, _Pace())
        lag = seconds / _expected_s(task, pool)
        pace.lags.append(lag)
        self._now_s = now_s
        if len(pace.lags) < LAST or median(pace.lags) < self._factor:
            pace.until_s, pace.pauses = None, 0
            self._behind.discard(task.members[0].id)
            return
        self._behind.add(task.members[0].id)
        if lag < self._factor:
            pace.until_s = now_s
        elif (
            pace.until_s is None or now_s >= pace.until_s
        ):  # else it had the chunk before the pause
            pace.until_s = now_s + self._backoff.pause_s(pace.pauses)
            pace.pauses += 1

    def check(self, now_s: float) -> None:
        """Looks for chunks that have not ended in time."""
        self._now_s = now_s
        if not self._factor:
            return
        self._overdue = {
            one.id
            for one in self._cluster.instances.values()
            if isinstance(one, PrefillInstance) and self._is_overdue(one)
        }

    def left(self, instance_id: str) -> None:
        """Forgets an instance."""
        self._paces.pop(instance_id, None)
        self._behind.discard(instance_id)
        self._overdue.discard(instance_id)

    def _is_closed(self, name: str) -> bool:
        if name in self._overdue:
            return True
        until_s, instance = self._paces[name].until_s, self._cluster.instances[name]
        pauses = until_s is not None and self._now_s < until_s
        return pauses or (isinstance(instance, PrefillInstance) and bool(instance.queue))

    def _is_overdue(self, instance: PrefillInstance) -> bool:
        pool = self._cluster.pool_of(instance)
        return any(
            self._spent_s(task) >= self._factor * _expected_s(task, pool)
            for task in instance.queue
            if len(task.members) == 1
        )

    def _spent_s(self, task: Task) -> float:
        running_s = 0.0 if task.started_s is None else self._now_s - task.started_s
        return task.executed_s + running_s


def _expected_s(task: Task, pool: Pool) -> float:
    return FLOOR_S + pool.corrected_s(task.band, task.modelled_s)
