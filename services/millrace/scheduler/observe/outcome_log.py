"""Writes what became of requests, and samples of the pools, to Redis for `millrace report`.

An error in the observation, or of the store, costs rows of the report and never the service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from millrace.core.autoscale.load import FleetLoad
from millrace.core.report.follower import OutcomeFollower
from millrace.core.report.pool_sample import TimedSample, samples_of
from millrace.core.scheduler.effects import Effect
from millrace.core.scheduler.events import Event
from millrace.core.scheduler.machine import Machine
from millrace.state.outcomes import RedisOutcomes
from millrace.state.store import StoreError

log = logging.getLogger(__name__)

#: Outcomes wait this long, so that many are written in one round trip.
WRITE_S: Final = 1.0
#: The distance of two samples of the pools.
SAMPLE_S: Final = 30.0
#: The samples that are kept: those of a week, of two pools.
MOST_SAMPLES: Final = 2 * 7 * 86400 // 30
MOST_WAITING: Final = 65_536


class OutcomeLog:
    """`saw` gets every step of the machine; `run` writes until it is cancelled."""

    def __init__(
        self,
        store: RedisOutcomes,
        machine: Machine,
        load: Callable[[], FleetLoad],
        *,
        most: int,
        clock: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """`load` returns the pools' load now, `clock` the time of the machine's steps."""
        self._store = store
        self._load = load
        self._most = most
        self._clock = clock
        self._zero_s = clock() - unix()
        self._follower: OutcomeFollower | None = OutcomeFollower(machine, self._zero_s)
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._sampled_s = clock()

    def saw(self, event: Event, effects: Iterable[Effect], now_s: float) -> None:
        """Takes in one step of the machine, immediately after the step."""
        if self._follower is None:
            return
        try:
            self._waiting.extend(o.encoded() for o in self._follower.saw(event, effects, now_s))
        except Exception:
            log.exception("reports end here: they can't follow %s", type(event).__name__)
            self._follower = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            await self.write()

    async def write(self) -> None:
        """Writes what waits, and a sample of the pools when it is time for one."""
        outcomes = list(self._waiting)
        self._waiting.clear()
        try:
            await self._store.add_outcomes(outcomes, self._most)
            if self._clock() - self._sampled_s >= SAMPLE_S:
                self._sampled_s = self._clock()
                await self._store.add_samples(self._samples(), MOST_SAMPLES)
        except StoreError as error:
            log.warning("%d requests may be missing in reports: %s", len(outcomes), error)

    async def close(self) -> None:
        await self.write()
        await self._store.close()

    def _samples(self) -> list[bytes]:
        now_s = self._clock()
        found = samples_of(self._load(), now_s)
        return [TimedSample(at_s=now_s - self._zero_s, sample=one).encoded() for one in found]
