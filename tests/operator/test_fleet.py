"""Simulated pools: any sequence of loads and failures keeps every invariant, and settles."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fleet_world import LIMITS, FleetWorld

POOLS = ("chat-prefill", "chat-decode")
POOL = st.sampled_from(POOLS)
WEATHER = st.one_of(
    st.tuples(st.just("nothing")),
    st.tuples(st.just("load"), POOL, st.floats(0.0, 8.0)),
    st.tuples(st.just("crash"), POOL, st.integers(0, 5)),
    st.tuples(st.just("silence"), st.floats(5.0, 120.0)),
    st.tuples(st.just("template"), st.integers(1, 3)),
    st.tuples(st.just("revision"), st.integers(1, 3)),
    st.tuples(st.just("operator dies"), st.integers(0, 4)),
)


def whole(world: FleetWorld) -> None:
    """Checks that each pool has its size, template and revision."""
    for role in ("prefill", "decode"):
        pool = world.pool(role)
        pods = [p for p in world.pods if p.pool == pool["metadata"]["name"]]
        assert len(pods) == len(world.serving(role)) == pool["spec"]["replicas"]
        assert {p.template for p in pods} == {pool["status"]["template"]}
        assert {p.revision for p in pods} == {pool["status"]["revision"]}
        assert LIMITS[0] <= len(pods) <= LIMITS[1]
        assert "draining" not in pool["status"]
        assert world.progressing(role) == "Settled"
    assert world.service["status"]["phase"] == "Ready"


WEATHERS = (
    st.integers(0, 2**32),
    st.lists(st.tuples(WEATHER, st.integers(0, 12)), max_size=20),
    st.sampled_from(["Migrate", "Abort", "Wait"]),
    st.sampled_from([0, 1]),
)


@settings(max_examples=6)
@given(*WEATHERS)
def test_any_weather(seed, weather, on_timeout, surge):
    live_through(seed, weather, on_timeout, surge)


@pytest.mark.parametrize("seed", [0, 5])
def test_a_new_instance_stays_while_the_last_old_one_is_replaced(seed):
    """Prefill shrinks to one in the middle of a new revision, without an extra instance."""
    weather = [(("nothing",), 1), (("revision", 1), 8), (("load", "chat-prefill", 0.0), 0)]
    live_through(seed, weather, "Migrate", 0)


def test_an_instance_that_may_still_be_cordoned_stands_in_for_nobody():
    """The pod is wanted again and ready while the scheduler, which has cordoned it, does not
    answer.
    """
    weather = [
        (("load", "chat-decode", 6.2), 5),
        (("nothing",), 5),
        (("silence", 30.0), 11),
        (("template", 1), 12),
        (("nothing",), 12),
        (("template", 3), 0),
        (("nothing",), 9),
        (("silence", 95.3), 2),
        (("template", 1), 12),
    ]
    live_through(2450818682, weather, "Abort", 0)


@pytest.mark.slow
@settings(max_examples=300)
@given(*WEATHERS)
def test_much_weather(seed, weather, on_timeout, surge):
    live_through(seed, weather, on_timeout, surge)


def live_through(seed: int, weather: list, on_timeout: str, surge: int) -> None:
    world = FleetWorld(Random(seed), on_timeout=on_timeout, surge=surge)
    for event, calm_ticks in weather:
        world.happen(event)
        for _ in range(calm_ticks):
            world.tick()
    world.silent_until_s = 0.0
    world.settle()
    whole(world)


@settings(max_examples=4)
@given(
    st.integers(0, 2**32),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.lists(st.tuples(st.sampled_from(["revision", "template"]), st.integers(1, 15)), max_size=3),
)
def test_a_rollout_takes_nothing_from_those_who_ask(seed, sizes, changes):
    """Without failures, under any changes: as many instances serve as are wanted, in pairs."""
    world = FleetWorld(Random(seed), mode="External", sizes=sizes)
    world.settle()
    for number, (what, ticks) in enumerate([*changes, ("revision", 400)]):
        world.happen((what, number + 10))
        for _ in range(ticks):
            world.tick()
            serving = {role: world.serving(role) for role in ("prefill", "decode")}
            assert all(
                len(pods) >= size for pods, size in zip(serving.values(), sizes, strict=True)
            )
            prefill, decode = ({pod.revision for pod in pods} for pods in serving.values())
            assert prefill & decode
            if ticks == 400 and rolled_out(world):
                break
    world.settle()
    whole(world)


def rolled_out(world: FleetWorld) -> bool:
    return all(world.progressing(role) == "Settled" for role in ("prefill", "decode"))


@settings(max_examples=6)
@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(POOL, st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=8),
)
def test_a_person_scales(seed, sizes):
    """Resizes to any size at any time: it succeeds, and no running work is cut short."""
    world = FleetWorld(Random(seed), mode="Off", on_timeout="Wait")
    for pool, size, ticks in sizes:
        world.tick()
        thing = next(p for p in world.pools() if p["metadata"]["name"] == pool)
        thing["spec"]["replicas"] = size
        for _ in range(ticks):
            world.tick()
    world.settle()
    for pool in world.pools():
        pods = [pod for pod in world.pods if pod.pool == pool["metadata"]["name"]]
        assert len(pods) == pool["spec"]["replicas"]
