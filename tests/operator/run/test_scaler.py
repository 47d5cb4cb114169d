"""Loads and autoscalers: how often the scheduler is asked, and the effect of an old load."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from millrace.core.autoscale.drain import Registration
from millrace.core.autoscale.load import FleetLoad, PoolLoad
from millrace.core.autoscale.rules import AutoscaleConfig, DecodeTargets, PrefillTargets
from millrace.wire.clients.scheduler_client import (
    InstanceView,
    SchedulerUnavailable,
    UnknownInstance,
)
from millrace_operator.run import load
from millrace_operator.run.load import Schedulers
from millrace_operator.run.scaler import ScaledPool, Scaler, View

ADDRESS = "chat-scheduler.default.svc:7070"


class World:
    """A clock, and a single scheduler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.pools = {"decode": PoolLoad(role="decode", ready=2, kv_utilisation=0.8)}
        self.parked = 0
        self.down = False
        self.calls: list[object] = []
        monkeypatch.setattr(load, "get_load", self.get_load)
        monkeypatch.setattr(load, "get_instances", self.get_instances)
        monkeypatch.setattr(load, "set_cordon", self.set_cordon)
        self.schedulers = Schedulers(clock=lambda: self.now_s)
        self.scaler = Scaler(self.schedulers, clock=lambda: self.now_s)

    async def get_load(self, address: str) -> FleetLoad:
        self._called("load", address)
        return FleetLoad(pools=dict(self.pools), parked_requests=self.parked)

    async def get_instances(self, address: str) -> list[InstanceView]:
        self._called("instances", address)
        sizes = {"running": 1, "waiting": 0, "total_pages": 9, "free_pages": 5}
        return [
            InstanceView(
                id="d-0", role="decode", address="a", draining=True, held_requests=3, **sizes
            )
        ]

    async def set_cordon(self, address: str, instance_id: str, cordoned: bool) -> None:
        self._called("cordon", address)
        if instance_id == "gone":
            raise UnknownInstance("gone")

    def _called(self, what: str, address: str) -> None:
        assert address == ADDRESS
        self.calls.append(what)
        if self.down:
            raise SchedulerUnavailable("no scheduler")

    async def look(self, pool: ScaledPool, after_s: float = 5.0) -> View:
        self.now_s += after_s
        return await self.scaler.view(pool)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def pool(
    uid: str = "u",
    *,
    role: str = "decode",
    wanted: int = 2,
    quota: int | None = None,
    followed: Callable[[PoolLoad], PoolLoad] = lambda load: load,
    **config: object,
) -> ScaledPool:
    targets = (DecodeTargets(),) if role == "decode" else (PrefillTargets(),)
    return ScaledPool(
        uid=uid,
        role=role,
        scheduler=ADDRESS,
        config=AutoscaleConfig(targets=targets, **config),
        interval_s=5.0,
        wanted=wanted,
        quota=quota,
        followed=followed,
    )


async def test_one_call_an_interval_serves_all_pools(world: World):
    pools = [pool("a"), pool("b", role="prefill"), pool("c")]
    for _ in range(4):
        world.now_s += 5.0
        await asyncio.gather(*(world.scaler.view(one) for one in pools))
        world.now_s += 0.3
        await asyncio.gather(*(world.scaler.view(one) for one in pools))
        world.now_s -= 0.3
    assert world.calls == ["load"] * 4


async def test_load_becomes_a_size(world: World):
    world.pools["decode"] = PoolLoad(role="decode", ready=2, kv_utilisation=1.0)
    view = await world.look(pool())
    assert view.recommendation.replicas == 3 and view.error == ""
    assert (view.metrics.ready, view.metrics.starting, view.age_s) == (2, 0, 0.0)
    view = await world.look(pool(wanted=3))
    assert (view.metrics.ready, view.metrics.starting) == (2, 1)
    assert (await world.look(pool("q", quota=2))).recommendation.limited_by == "quota"


async def test_a_size_is_thought_over_once_an_interval(world: World):
    world.pools["decode"] = PoolLoad(role="decode", ready=2, kv_utilisation=1.0)
    first = (await world.look(pool())).recommendation
    again = (await world.look(pool(), 1.0)).recommendation
    assert again is first
    followed = (await world.look(pool(wanted=3), 1.0)).recommendation
    assert followed is first
    by_hand = (await world.look(pool(wanted=6), 1.0)).recommendation
    assert by_hand is not first and by_hand.replicas == 5  # back, one at a time


async def test_other_settings_or_another_pool_start_anew(world: World):
    first = (await world.look(pool())).recommendation
    assert (await world.look(pool(max_replicas=1), 0.1)).recommendation.replicas == 1
    assert (await world.look(pool("other"), 0.1)).recommendation is not first
    world.scaler.forget("u")
    world.scaler.forget("never")
    assert (await world.look(pool(), 0.1)).recommendation is not first


async def test_a_surge_is_not_capacity(world: World):
    """Three are ready while a rollout replaces two: the pool does not keep the third."""
    world.pools["decode"] = PoolLoad(role="decode", ready=3, kv_utilisation=0.8)
    view = await world.look(pool())
    assert (view.metrics.ready, view.recommendation.replicas) == (2, 2)


async def test_old_news_moves_nothing(world: World):
    await world.look(pool())
    world.down = True
    world.pools["decode"] = PoolLoad(role="decode", ready=2, kv_utilisation=1.0)
    for _ in range(8):
        view = await world.look(pool())
        assert view.error == "no scheduler" and view.recommendation.replicas == 2
    assert view.age_s == 40.0 and view.recommendation.reason == "metrics are 40 s old"
    world.down = False
    view = await world.look(pool())
    assert (view.error, view.recommendation.replicas) == ("", 3)


async def test_without_any_news_only_limits_count(world: World):
    world.down = True
    view = await world.look(pool())
    assert (view.metrics, view.age_s, view.error) == (None, math.inf, "no scheduler")
    assert (view.recommendation.replicas, view.recommendation.reason) == (2, "no metrics yet")
    assert (await world.look(pool(wanted=9))).recommendation.replicas == 8
    asleep = pool("z", wanted=0, min_replicas=0, scale_to_zero=True)
    assert (await world.look(asleep)).recommendation.replicas == 0
    awake = pool("y", wanted=1, min_replicas=0, scale_to_zero=True, idle_s=0.0)
    assert (await world.look(awake)).recommendation.replicas == 1


async def test_parked_requests_wake_a_pool(world: World):
    world.parked = 2
    view = await world.look(pool(wanted=0, min_replicas=0, scale_to_zero=True))
    assert view.recommendation.replicas == 1
    assert view.recommendation.reason == "2 parked requests"


async def test_signals_that_are_not_followed_have_no_say(world: World):
    world.pools["decode"] = PoolLoad(role="decode", ready=2, kv_utilisation=1.0)
    deaf = pool(followed=lambda load: PoolLoad(role=load.role, ready=load.ready))
    assert (await world.look(deaf)).recommendation.replicas == 2


async def test_a_silent_scheduler_is_left_alone_for_a_while(world: World):
    world.down = True
    assert await world.schedulers.instances(ADDRESS) is None
    sample = await world.schedulers.load(ADDRESS, fresh_s=5.0)
    assert (world.calls, sample.error) == (["instances"], "no scheduler")
    world.now_s += load.SILENCE_S
    await world.schedulers.load(ADDRESS, fresh_s=5.0)
    assert world.calls == ["instances", "load"]


async def test_instances_are_asked_anew_after_a_change(world: World):
    expected = {"d-0": Registration(cordoned=True, held_requests=3)}
    assert await world.schedulers.instances(ADDRESS) == expected
    assert await world.schedulers.instances(ADDRESS) == expected
    await world.schedulers.cordon(ADDRESS, "d-0", cordoned=True)
    await world.schedulers.instances(ADDRESS)
    assert world.calls == ["instances", "cordon", "instances"]
    await world.schedulers.cordon(ADDRESS, "gone", cordoned=True)  # does not need it any more
    world.down = True
    with pytest.raises(SchedulerUnavailable):
        await world.schedulers.cordon(ADDRESS, "d-0", cordoned=True)
