"""Pools as they live: any sequence of loads and failures keeps every promise, and ends in calm."""

from __future__ import annotations

from random import Random

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


def happen(world: FleetWorld, event: tuple) -> None:
    match event:
        case ("load", pool, load):
            world.load[pool] = load
        case ("crash", pool, index):
            world.crash(pool, index)
        case ("silence", seconds):
            world.silent_until_s = world.now_s + seconds
        case ("template", number):
            world.service["spec"]["settings"] = {"engine.max_batch": str(number)}
        case ("revision", number):
            world.change(revision=f"r{number}")
    world.tick(stop_after=event[1] if event[0] == "operator dies" else None)


def whole(world: FleetWorld) -> None:
    """Each pool has its size, and the template and revision that it is to have."""
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


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(WEATHER, st.integers(0, 12)), max_size=20),
    st.sampled_from(["Migrate", "Abort", "Wait"]),
    st.sampled_from([0, 1]),
)
def test_any_weather(seed, weather, on_timeout, surge):
    world = FleetWorld(Random(seed), on_timeout=on_timeout, surge=surge)
    for event, calm_ticks in weather:
        happen(world, event)
        for _ in range(calm_ticks):
            world.tick()
    world.silent_until_s = 0.0
    world.settle()
    whole(world)
