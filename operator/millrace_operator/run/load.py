"""Reads the load of pools from the schedulers: one call per interval for all pools of a service.

Times are of a monotonic clock, in seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from millrace.core.autoscale.drain import Registration
from millrace.core.autoscale.load import FleetLoad
from millrace.wire.clients.scheduler_client import (
    SchedulerUnavailable,
    UnknownInstance,
    evict,
    get_instances,
    get_load,
    set_cordon,
)

#: Seconds for which a list of instances is reused: for one round of all pools.
INSTANCES_FRESH_S = 1.0

#: Seconds for which a scheduler that did not answer is not called again; callers get its last
#: answer.
SILENCE_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The last load that a scheduler reported, and why there is no newer load ("": it is fresh)."""

    load: FleetLoad | None = None
    sampled_s: float = -float("inf")
    error: str = ""


@dataclass(slots=True, eq=False)
class _Scheduler:
    """The known state of one scheduler."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    sample: Sample = Sample()
    instances: Mapping[str, Registration] = field(default_factory=dict)
    instances_s: float = -float("inf")
    silent_s: float = -float("inf")  # when it last failed to answer
    error: str = ""


class Schedulers:
    """Schedulers by address. Each has one call in flight at most, so that pools share the
    answers.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._on_error = on_error
        self._known: dict[str, _Scheduler] = {}

    async def load(self, address: str, *, fresh_s: float) -> Sample:
        """Returns a sample at most `fresh_s` old, or else the last sample, with the error."""
        known = self._known.setdefault(address, _Scheduler())
        async with known.lock:
            if self._clock() - known.sample.sampled_s >= fresh_s:
                asked_s = self._clock()
                load = await self._ask(known, lambda: get_load(address))
                if load is not None:
                    known.sample = Sample(load=load, sampled_s=asked_s)
            fresh = self._clock() - known.sample.sampled_s < fresh_s
            return replace(known.sample, error="" if fresh else known.error)

    async def instances(self, address: str) -> Mapping[str, Registration] | None:
        """Returns instances by id; None when the scheduler does not answer."""
        known = self._known.setdefault(address, _Scheduler())
        async with known.lock:
            if self._clock() - known.instances_s < INSTANCES_FRESH_S:
                return known.instances
            asked_s = self._clock()
            views = await self._ask(known, lambda: get_instances(address))
            if views is None:
                return None
            known.instances_s = asked_s
            known.instances = {
                view.id: Registration(cordoned=view.draining, held_requests=view.held_requests)
                for view in views
            }
            return known.instances

    async def cordon(self, address: str, instance_id: str, *, cordoned: bool) -> None:
        """Cordons or uncordons an instance; does nothing if it is gone. Raises
        SchedulerUnavailable.
        """
        await self._tell(address, lambda: set_cordon(address, instance_id, cordoned))

    async def evict(self, address: str, instance_id: str, *, abort: bool) -> None:
        """Evicts an instance's requests; does nothing if it is gone. Raises
        SchedulerUnavailable.
        """
        await self._tell(address, lambda: evict(address, instance_id, abort=abort))

    def forget(self, address: str) -> None:
        """Forgets a scheduler whose service is deleted."""
        self._known.pop(address, None)

    async def _ask(self, known: _Scheduler, call: Callable[[], Awaitable[T]]) -> T | None:
        if self._clock() - known.silent_s < SILENCE_S:
            return None
        try:
            return await call()
        except SchedulerUnavailable as error:
            known.silent_s, known.error = self._clock(), str(error)
            self._on_error()
            return None

    async def _tell(self, address: str, call: Callable[[], Awaitable[None]]) -> None:
        known = self._known.setdefault(address, _Scheduler())
        async with known.lock:
            known.instances_s = -float("inf")
            try:
                await call()
            except UnknownInstance:
                pass
            except SchedulerUnavailable:
                self._on_error()
                raise
