"""The autoscaling loop over a simulated world: load is scripted, time is an argument."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import pytest

from millrace.core.autoscale.load import FleetLoad, PoolLoad
from millrace.core.autoscale.rules import AutoscaleConfig, Direction, PrefillTargets
from millrace.core.config import ScalingConfig
from millrace.core.errors import ConfigError
from millrace.local.autoscale import EVICTION_S, Autoscale, Decision, Pool
from millrace.local.scaling import Scaling, parse_sizes
from millrace.wire.clients.scheduler_client import (
    InstanceView,
    SchedulerUnavailable,
    UnknownInstance,
)

DRAIN_TIMEOUT_S = 10.0
CONFIG = AutoscaleConfig(
    targets=(PrefillTargets(),),
    max_replicas=4,
    up=Direction(max_step=4, period_s=0.0),
    down=Direction(max_step=4, window_s=5.0, period_s=0.0),
    scale_to_zero=True,
    idle_s=20.0,
)


@dataclass
class World:
    """A prefill pool's instances, and the scheduler that knows the running ones."""

    up: dict[str, InstanceView] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    silent: bool = False  # the scheduler does not answer
    load: PoolLoad = field(default_factory=lambda: PoolLoad(role="prefill", active_requests=1))
    parked: int = 0
    role: str = "prefill"
    names: itertools.count = field(default_factory=itertools.count)

    # ---- the connector

    def instances(self) -> list[str]:
        return list(self.asked)

    def start(self) -> str:
        self.asked.append(f"p{next(self.names)}")
        return self.asked[-1]

    def stop(self, instance_id: str) -> None:
        self.asked.remove(instance_id)
        self.stopped.append(instance_id)
        self.up.pop(instance_id, None)

    # ---- the scheduler

    async def get_load(self) -> FleetLoad:
        self._answer()
        ready = sum(not view.draining for view in self.up.values())
        draining = len(self.up) - ready
        load = replace(self.load, ready=ready, draining=draining)
        return FleetLoad(pools={"prefill": load}, parked_requests=self.parked)

    async def get_instances(self) -> list[InstanceView]:
        self._answer()
        return list(self.up.values())

    async def set_cordon(self, instance_id: str, cordoned: bool) -> None:
        self.change(instance_id, draining=cordoned)

    async def evict(self, instance_id: str) -> None:
        self.change(instance_id, draining=True)
        self.evicted.append(instance_id)

    def _answer(self) -> None:
        if self.silent:
            raise SchedulerUnavailable("no scheduler")

    # ---- the script

    def comes_up(self, *names: str, held: int = 0) -> None:
        for name in names or [n for n in self.asked if n not in self.up]:
            self.up[name] = InstanceView(
                id=name,
                role="prefill",
                address="127.0.0.1:1",
                draining=False,
                running=0,
                waiting=0,
                held_requests=held,
                total_pages=10,
                free_pages=10,
            )

    def change(self, name: str, **fields: object) -> None:
        self._answer()
        if name not in self.up:
            raise UnknownInstance(name)
        self.up[name] = replace(self.up[name], **fields)

    def cordoned(self) -> list[str]:
        return sorted(name for name, view in self.up.items() if view.draining)


class Fixture:
    """Runs a loop over a world, at its own time."""

    def __init__(self, instances: int, config: AutoscaleConfig = CONFIG) -> None:
        self.world = World()
        for _ in range(instances):
            self.world.start()
        self.world.comes_up()
        self.lines: list[str] = []
        self.decisions: list[Decision] = []
        self.pool = Pool(
            self.world,
            self.world,
            config,
            drain_timeout_s=DRAIN_TIMEOUT_S,
            report=self.lines.append,
        )
        self.loop = Autoscale(self.world, [self.pool], 1.0, self.decisions.append)
        self.now_s = 0.0

    async def look(self, seconds: float = 0.5, times: int = 1) -> None:
        for _ in range(times):
            self.now_s += seconds
            await self.loop.check(self.now_s)

    async def shrunk(self, size: int) -> None:
        """Resizes the pool without a load: the tests are about drains."""
        self.pool.resize(size, self.now_s)
        self.loop.pools = []
        await self.settle()

    async def settle(self, seconds: float = 0.25) -> None:
        self.now_s += seconds
        views = None if self.world.silent else dict(self.world.up)
        await self.pool.settle(views, self.now_s)


async def test_a_backlog_starts_instances_and_calm_drains_them() -> None:
    f = Fixture(1)
    f.world.load = replace(f.world.load, backlog_s=11.0)
    await f.look()
    assert f.world.asked == ["p0", "p1", "p2"]
    assert str(f.decisions[0]) == "prefill 1 -> 3: backlog of 11 s an instance, target 4"

    await f.look(times=10)
    assert len(f.world.asked) == 3, "what starts is capacity"
    f.world.comes_up()
    f.world.load = replace(f.world.load, backlog_s=0.5)
    await f.look(times=9)
    assert f.world.asked == ["p0", "p1", "p2"], "scale-in waits a window"
    await f.look(times=4)
    assert f.world.asked == ["p0"]
    assert f.world.stopped == ["p2", "p1"], "the youngest of equals goes first"


async def test_one_that_holds_requests_goes_when_it_holds_none() -> None:
    f = Fixture(2)
    f.world.change("p0", held_requests=3)
    f.world.change("p1", held_requests=5)
    await f.settle()
    await f.shrunk(1)
    assert f.world.cordoned() == ["p0"], "the one that holds least"
    await f.settle(seconds=5)
    f.world.change("p0", held_requests=1)
    await f.settle()
    assert f.world.stopped == []

    f.world.change("p0", held_requests=0)
    await f.settle()
    assert f.world.stopped == ["p0"]
    assert f.world.evicted == []
    assert f.lines[-1] == "p0 goes: drained in 5.8 s"


async def test_one_that_does_not_drain_in_time_is_evicted_and_ended_at_last() -> None:
    f = Fixture(2)
    for name in ("p0", "p1"):
        f.world.change(name, held_requests=1)
    await f.settle()
    await f.shrunk(1)
    await f.settle(seconds=DRAIN_TIMEOUT_S)
    await f.settle()
    assert f.world.evicted == ["p1"]
    assert f.world.stopped == []
    await f.settle(seconds=EVICTION_S)
    assert f.world.stopped == ["p1"]


async def test_load_that_is_back_undoes_drains_before_it_starts_any() -> None:
    f = Fixture(3)
    for held, name in enumerate(("p0", "p1", "p2"), 1):
        f.world.change(name, held_requests=held)
    await f.settle()
    await f.shrunk(1)
    assert f.world.cordoned() == ["p0", "p1"]
    f.pool.resize(2, f.now_s)
    await f.settle()
    assert f.world.cordoned() == ["p0"], "the one that would have taken longest stays"
    f.pool.resize(4, f.now_s)
    await f.settle()
    assert f.world.cordoned() == []
    assert f.world.asked == ["p0", "p1", "p2", "p3"]
    assert f.world.stopped == []


async def test_what_does_not_serve_yet_goes_first_and_at_once() -> None:
    f = Fixture(1)
    f.pool.resize(3, 0.0)
    await f.shrunk(1)
    assert f.world.stopped == ["p2", "p1"] or f.world.stopped == ["p1", "p2"]
    assert f.world.cordoned() == []


async def test_a_cordon_outlives_the_schedulers_memory() -> None:
    f = Fixture(2)
    f.world.change("p1", held_requests=1)
    f.world.change("p0", held_requests=2)
    await f.settle()
    await f.shrunk(1)
    f.world.comes_up("p0", "p1", held=1)  # registered again, at a scheduler that knows no cordon
    await f.settle()
    assert f.world.cordoned() == ["p1"]


async def test_the_drain_of_an_instance_that_is_gone_is_not_cancelled() -> None:
    f = Fixture(2)
    f.pool.resize(1, f.now_s)
    f.world.asked.remove("p1")
    f.pool.resize(2, f.now_s)
    assert f.world.asked == ["p0", "p2"]


async def test_an_instance_that_the_scheduler_has_lost_holds_up_no_other() -> None:
    f = Fixture(3)
    f.pool.resize(1, f.now_s)
    views = dict(f.world.up)
    del f.world.up["p2"]
    await f.pool.settle(views, f.now_s)
    assert f.world.cordoned() == ["p1"]
    assert f.world.stopped == []
    await f.settle()
    assert f.world.stopped == ["p2", "p1"]


async def test_a_silent_scheduler_ends_nothing_before_the_drain_timeout() -> None:
    f = Fixture(2)
    await f.settle()
    f.pool.resize(1, f.now_s)
    f.world.silent = True
    await f.settle(seconds=DRAIN_TIMEOUT_S - 1)
    assert f.world.stopped == []
    await f.settle(seconds=1)
    assert f.world.stopped == ["p1"]


async def test_a_silent_scheduler_changes_no_size() -> None:
    f = Fixture(2)
    f.world.silent = True
    await f.look(times=5)
    assert f.decisions == [], "nothing is known yet"
    f.world.silent = False
    await f.look(times=5)
    f.world.silent = True
    await f.look(seconds=10, times=10)
    assert f.world.asked == ["p0", "p1"]
    assert f.decisions[-1].recommendation.reason.startswith("metrics are")


async def test_a_cordon_of_somebody_else_is_not_lifted() -> None:
    f = Fixture(2)
    f.world.change("p0", draining=True)
    await f.look(times=4)
    assert f.world.cordoned() == ["p0"]


async def test_an_idle_pool_goes_entirely_and_a_parked_request_wakes_it() -> None:
    f = Fixture(1)
    f.world.load = PoolLoad(role="prefill", backlog_s=0.0)
    await f.look(seconds=1, times=23)
    assert f.world.asked == []
    f.world.parked = 2
    await f.look(seconds=1)
    assert f.world.asked == ["p1"], "an id is never given twice"
    assert f.decisions[-1].recommendation.reason == "2 parked requests"
    await f.look(seconds=1, times=5)
    assert f.world.asked == ["p1"]


async def test_one_that_can_not_start_is_asked_for_again() -> None:
    f = Fixture(1)
    f.world.load = replace(f.world.load, backlog_s=8.0)
    await f.look()
    assert f.world.asked == ["p0", "p1"]
    f.world.asked.remove("p1")
    await f.look(times=3)
    assert f.world.asked == ["p0", "p2"]


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_nothing_is_ended_that_holds_requests(seed: int) -> None:
    """Instances start, stop, die and return, the scheduler fails: 300 random checks."""
    rng = random.Random(seed)
    f = Fixture(2)
    world = f.world
    end = world.stop
    since: dict[str, float] = {}

    def stop(name: str) -> None:
        view = world.up.get(name)
        overdue = f.now_s - since.get(name, f.now_s) >= DRAIN_TIMEOUT_S
        assert overdue or view is None or (view.draining and not view.held_requests)
        end(name)

    world.stop = stop  # type: ignore[method-assign]
    for _ in range(300):
        world.silent = rng.random() < 0.1
        world.load = replace(world.load, backlog_s=rng.choice([0.0, 2.0, 9.0, 20.0]))
        for name in list(world.asked):
            if name not in world.up and rng.random() < 0.3:
                world.comes_up(name)
            elif name in world.up and rng.random() < 0.05:
                del world.up[name]
        for name, view in list(world.up.items()):
            held = 0 if view.draining and rng.random() < 0.3 else rng.randint(0, 3)
            world.up[name] = replace(view, held_requests=min(held, view.held_requests or held))
        await f.look()
        draining = f.pool.draining
        since = {n: since.get(n, f.now_s) for n in draining}
        assert f.pool.size == len(set(world.asked) - draining)
        assert 1 <= f.pool.size <= CONFIG.max_replicas
    world.silent = False
    world.load = replace(world.load, backlog_s=9.0)
    for _ in range(100):
        world.comes_up()
        for name in world.up:
            world.change(name, held_requests=0)
        await f.look()
    assert f.pool.size == len(world.asked) == 3
    assert world.cordoned() == []


def test_sizes_of_the_command_line() -> None:
    assert parse_sizes({"prefill": "", "decode": "3"}, autoscale=False) == {
        "prefill": (2, 2),
        "decode": (3, 3),
    }
    assert parse_sizes({"prefill": "", "decode": "2:5"}, autoscale=True) == {
        "prefill": (1, 4),
        "decode": (2, 5),
    }
    for text in ("0", "0:2", "3:2", "1:", ":2", "x", "1:2:3", "-1"):
        with pytest.raises(ConfigError, match=r"--decode '"):
            parse_sizes({"decode": text}, autoscale=True)
    with pytest.raises(ConfigError, match="needs --autoscale"):
        parse_sizes({"prefill": "1:2"}, autoscale=False)


def test_settings_become_a_pools_limits() -> None:
    config = ScalingConfig(up_step=3, down_window_s=7.0, idle_s=9.0)
    found = Scaling(sizes={"decode": (1, 5)}, config=config, to_zero=True).of("decode")
    assert (found.min_replicas, found.max_replicas) == (1, 5)
    assert (found.up.max_step, found.down.window_s, found.idle_s) == (3, 7.0, 9.0)
    assert found.scale_to_zero
