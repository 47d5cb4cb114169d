"""Simulated pools whose stages have pods of their own keep every invariant, and settle."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.group_world import STAGES, GroupWorld

POOL = st.sampled_from(("chat-prefill", "chat-decode"))
WEATHER = st.one_of(
    st.tuples(st.just("nothing")),
    st.tuples(st.just("load"), POOL, st.floats(0.0, 8.0)),
    st.tuples(st.sampled_from(["crash", "lose_stage", "evict"]), POOL, st.integers(0, 5)),
    st.tuples(st.just("silence"), st.floats(5.0, 120.0)),
    st.tuples(st.sampled_from(["template", "revision"]), st.integers(1, 3)),
    st.tuples(st.just("kind"), st.booleans()),
    st.tuples(st.just("operator dies"), st.integers(0, 4)),
)
WEATHERS = (
    st.integers(0, 2**32),
    st.lists(st.tuples(WEATHER, st.integers(0, 12)), max_size=20),
    st.sampled_from(["Migrate", "Abort", "Wait"]),
    st.sampled_from([0, 1]),
    st.booleans(),
)


def live_through(
    seed: int, weather: list[Any], on_timeout: str, surge: int, lws: bool
) -> GroupWorld:
    world = GroupWorld(Random(seed), lws=lws, on_timeout=on_timeout, surge=surge)
    for event, calm_ticks in weather:
        world.happen(event)
        for _ in range(calm_ticks):
            world.tick()
    world.silent_until_s = 0.0
    world.settle(800)  # drains without a limit take their time
    whole(world)
    return world


def whole(world: GroupWorld) -> None:
    """Checks that each pool has its size of groups, all of its template, and nothing else."""
    for role in ("prefill", "decode"):
        pool = world.pool(role)
        name, size = pool["metadata"]["name"], pool["spec"]["replicas"]
        nodes = [one for one in world.groups() if one.pool == name]
        assert len(nodes) == len(world.serving(role)) == size
        assert {one.template for one in nodes} == {pool["status"]["template"]}
        assert {one.later_template for one in nodes} == {pool["status"]["template"]}
        assert world.progressing(role) == "Settled"
        wanted = set()
        for one in nodes:
            group = f"{name}-{one.ordinal}"
            is_lws = ("LeaderWorkerSet", group) in world.live
            kinds = [("LeaderWorkerSet", group)]
            own = [("StatefulSet", group), ("StatefulSet", one.name)]
            wanted |= set(kinds if is_lws else own)
        made = {k for k in world.live if k[1].startswith(f"{name}-") and k[0].endswith("Set")}
        assert made == wanted


@settings(max_examples=8)
@given(*WEATHERS)
def test_any_weather(seed: int, weather: list[Any], on_timeout: str, surge: int, lws: bool) -> None:
    live_through(seed, weather, on_timeout, surge, lws)


@pytest.mark.slow
@settings(max_examples=300)
@given(*WEATHERS)
def test_much_weather(
    seed: int, weather: list[Any], on_timeout: str, surge: int, lws: bool
) -> None:
    live_through(seed, weather, on_timeout, surge, lws)


@pytest.mark.parametrize("lws", [False, True])
@pytest.mark.parametrize("surge", [0, 1])
def test_every_event_of_a_group_in_turn(surge: int, lws: bool) -> None:
    pools = ("chat-prefill", "chat-decode")
    events: list[tuple[Any, ...]] = [
        *((what, pool, 0) for what in ("lose_stage", "evict", "crash") for pool in pools),
        ("template", 1),
        ("kind", not lws),
        ("revision", 1),
        ("lose_stage", "chat-decode", 1),
    ]
    world = live_through(3, [(event, 12) for event in events], "Migrate", surge, lws)
    assert world.service["spec"]["decode"]["stages"] == STAGES
    assert world.events["Drained"] >= 4
