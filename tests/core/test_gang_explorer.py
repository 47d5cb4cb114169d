"""Gangs under the real machine: every order in which things can happen, in small worlds.

Whatever arrives first, and whoever dies: the members of a gang stop at one position, no instance
does two things, nothing waits for ever, and all requests are served in the end.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from millrace.core.stop_point import StopPoint
from support.explore import explore
from support.gang_world import Prompt, Scenario, World

#: Each is to go before those above it, and shares an instance with each.
THREE = (
    Prompt("a", 9.0, ((0, 1),)),
    Prompt("b", 5.0, ((1, 2),)),
    Prompt("c", 2.0, ((2, 0),)),
)
TWO = THREE[:2]
GROWING = (Prompt("a", 9.0, ((0,), (0, 1))), Prompt("b", 5.0, ((1,),)))
LONGER = (StopPoint.PASS, StopPoint.OPERATOR, StopPoint.LAYER)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(TWO),
        Scenario(GROWING, instances=2),
    ],
    ids=["two gangs", "a growing group"],
)
def test_in_every_order_of_events_all_is_done(scenario: Scenario) -> None:
    found = explore(scenario)
    assert found.states > 100 and found.ends > 0
    assert found.stops > 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(TWO, crashes=1),
        Scenario(TWO, stops=LONGER),
        Scenario(TWO, preemption="none"),
        Scenario(TWO, most_held=0),
        Scenario(GROWING, instances=2, stops=LONGER, crashes=1),
    ],
    ids=[
        "two gangs and a death",
        "longer",
        "no preemption",
        "none may be held",
        "a growing group and a death",
    ],
)
def test_in_every_order_of_events_all_is_done_in_larger_worlds(scenario: Scenario) -> None:
    explore(scenario)


@pytest.mark.parametrize("crashes", [0, 1, 2])
@pytest.mark.parametrize("preemption", ["operator", "layer", "chunk"])
def test_on_random_ways_three_overlapping_gangs_all_end(preemption: str, crashes: int) -> None:
    stops = 0
    for seed in range(60):
        draw = random.Random(seed)
        prompts = list(THREE)
        draw.shuffle(prompts)
        more = (Prompt("d", 1.0, ((1,), (1, 0, 2))), Prompt("e", 0.5, ((draw.randrange(3),),)))
        scenario = Scenario(
            (*prompts, *draw.sample(more, 2)),
            stops=(StopPoint.PASS, *draw.choices(list(StopPoint)[:3], k=draw.randint(1, 4))),
            preemption=preemption,
            most_held=draw.choice([0, 1, 8]),
            crashes=crashes,
        )
        world = World(replace(scenario))
        try:
            stops += _wander(world, draw)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert stops > 20


def _wander(world: World, draw: random.Random) -> int:
    """Plays moves until none is left. Some links are slow for a while, some instances."""
    steps = 0
    while moves := world.moves():
        if draw.random() < 0.97:
            moves = [move for move in moves if move[0] != "crash"] or moves
        if all(move[0] == "crash" for move in moves):
            break
        world.play(draw.choice(moves[: draw.randint(1, len(moves))]))
        steps += 1
        assert steps < 5000, "this goes on for ever"
    world.check_end()
    return world.stops
