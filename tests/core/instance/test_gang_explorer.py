"""Gangs under the real machine: every order of events, in small worlds.

For any order of arrivals and any death: the members of a gang stop at one position, no instance
does two things at once, nothing waits for ever, and all requests are served in the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import replace

import pytest

from core.instance.gang_explorer import Atlas, Kept, explore
from core.instance.gang_node import Node, Prompt, Scenario, Scheduler
from core.instance.gang_world import ACCIDENTS, World
from millrace.core.instance.gang import Gang, Message, MessageKind, State
from millrace.core.instance.stop_point import StopPoint
from millrace.core.scheduler.dispatch.stall_watch import StallWatch

#: Each goes before those above it, and shares an instance with each.
THREE = (
    Prompt("a", 9.0, ((0, 1),)),
    Prompt("b", 5.0, ((1, 2),)),
    Prompt("c", 2.0, ((2, 0),)),
)
TWO = THREE[:2]
GROWING = (Prompt("a", 9.0, ((0,), (0, 1))), Prompt("b", 5.0, ((1,),)))
SOLO = (Prompt("a", 9.0, ((0, 1),)), Prompt("b", 5.0, ((1,),)))
GANG = "millrace.core.instance.gang.Gang"
LONGER = (StopPoint.PASS, StopPoint.OPERATOR, StopPoint.LAYER)
MANY_WAYS = pytest.mark.parametrize(
    "ways",
    [range(10), pytest.param(range(10, 50), marks=pytest.mark.slow)],
    ids=["few ways", "many ways"],
)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(TWO),
        Scenario(TWO, crashes=1, mortal=(1,)),
        Scenario(GROWING, instances=2),
        Scenario(GROWING, instances=2, stops=LONGER, crashes=1),
        Scenario(TWO, rings=(1,)),
        Scenario(SOLO, instances=2, policies=("fcfs", "edf"), cancels=("a",)),
        Scenario(GROWING, instances=2, policies=("fcfs",)),
    ],
    ids=[
        "two gangs",
        "two gangs and the death of what they share",
        "a growing group",
        "a growing group and a death",
        "two gangs whose members end at different times",
        "a gang and a prompt, changed orders and a cancel",
        "a growing group and a changed order",
    ],
)
def test_in_every_order_of_events_all_is_done(scenario: Scenario) -> None:
    found = explore(scenario)
    assert found.states > 100
    assert found.ends
    assert found.stops > 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(THREE, opens_at_once=True),
        Scenario(TWO, crashes=2),
        Scenario(TWO, stops=LONGER, rings=(2,)),
        Scenario(TWO, most_held=0),
        Scenario(THREE, preemption="none"),
        Scenario(TWO, rings=(1,), cancels=("a", "b")),
        Scenario(TWO, rings=(1,), failures=1),
        Scenario(SOLO, instances=2, policies=("fcfs", "edf"), cancels=("a",), failures=1),
        Scenario(TWO, losses=1),
        Scenario(TWO, policies=("fcfs", "edf")),
        Scenario(SOLO, instances=2, policies=("fcfs", "edf"), cancels=("a", "b")),
        Scenario(GROWING, instances=2, policies=("fcfs",), failures=1),
    ],
    ids=[
        "three gangs",
        "two gangs and two deaths",
        "longer",
        "none may be held",
        "three gangs without preemption",
        "two gangs and cancels",
        "two gangs and an instance that gives up",
        "a gang and a prompt, and all of these",
        "two gangs and a lost message",
        "two gangs whose order changes twice",
        "a gang and a prompt, changed orders and cancels",
        "a growing group, a changed order and an instance that gives up",
    ],
)
def test_in_every_order_of_events_all_is_done_in_larger_worlds(scenario: Scenario) -> None:
    explore(scenario)


class _Anew(Kept):
    def __hash__(self) -> int:
        return hash(self.digest)

    def after(self, word: Hashable) -> tuple[Kept, tuple[object, ...]]:
        self._after.clear()
        return super().after(word)


class _Forgetful(Atlas):
    def keep(self, part: Scheduler | Node) -> Kept:
        return _Anew(self, part)


def _start_and_remember_who_was_ready(gang: Gang, sender: str, message: Message) -> None:
    had_started = gang.has_started
    HEAR(gang, sender, message)
    if gang.has_started and not had_started and gang.spec.me == gang.spec.leader:
        gang.ready.update(gang.spec.members)


def _agree_on_own_count(gang: Gang, sender: str, message: Message) -> None:
    if message.kind is MessageKind.HELD:
        message = replace(message, value=gang.begun, finest=gang.finest())
    HEAR(gang, sender, message)


def _withdraw_without_answer(gang: Gang) -> None:
    WITHDRAW(gang)
    gang.state = State.AWAY


def _call_nobody(gang: Gang) -> None:
    here = Message(gang.spec.key, MessageKind.HERE)
    if gang.spec.me == gang.spec.leader:
        gang.hear(gang.spec.me, here)
    else:
        gang.say(gang.spec.leader, here)


def _say_nothing_on_entering(gang: Gang) -> None:
    if gang.spec.me == gang.spec.leader:
        ENTER(gang)


def _open_from_the_beginning(gang: Gang) -> None:
    """Runs the earlier protocol: a member's messages before the leader was linked to it were
    lost."""
    gang.is_open = True
    ENTER(gang)


def _say_nothing(message: Message) -> None:
    return None


ENTER, HEAR, WITHDRAW = Gang.enter, Gang.hear, Gang.withdraw


@pytest.mark.parametrize(
    ("where", "defect"),
    [
        (f"{GANG}.hear", _agree_on_own_count),
        (f"{GANG}.hear", _start_and_remember_who_was_ready),
        (f"{GANG}.enter", _call_nobody),
        (f"{GANG}.enter", _say_nothing_on_entering),
        (f"{GANG}.enter", _open_from_the_beginning),
        (f"{GANG}.withdraw", _withdraw_without_answer),
        ("millrace.core.instance.preemption.answer_without_task", _say_nothing),
    ],
)
@pytest.mark.parametrize("atlas", [Atlas, pytest.param(_Forgetful, marks=pytest.mark.slow)])
def test_a_protocol_with_a_defect_is_found_wrong(
    monkeypatch: pytest.MonkeyPatch, where: str, defect: Callable[..., None], atlas: type[Atlas]
) -> None:
    monkeypatch.setattr(where, defect)
    with pytest.raises(AssertionError):
        explore(Scenario(TWO, rings=(1,)), atlas())


def test_words_that_are_lost_before_members_are_linked_stop_nobody() -> None:
    """A prompt of one member that goes before a gang which the leader does not have yet."""
    explore(Scenario(SOLO, instances=2))


@pytest.mark.parametrize(
    "scenario",
    [Scenario(SOLO, instances=2, losses=2), Scenario(GROWING, instances=2, losses=1, stops=LONGER)],
    ids=["a gang and a prompt, two messages", "a growing group, one message"],
)
def test_the_watch_puts_right_what_lost_messages_stop(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    explore(scenario)
    monkeypatch.setattr(StallWatch, "check", lambda watch, step: None)
    with pytest.raises(AssertionError, match=r"requests are left behind|go on for ever"):
        explore(scenario)


def test_parts_do_again_what_they_did_before() -> None:
    """A kept result of one path holds for all paths that lead to the same state."""
    for scenario in (Scenario(THREE, crashes=1), Scenario(GROWING, instances=2, crashes=1)):
        atlas = Atlas()
        for seed in range(25):
            draw = random.Random(seed)
            live, kept = World(scenario), World(scenario, atlas.keep)
            while moves := live.moves():
                assert kept.moves() == moves
                assert kept.digest() == live.digest()
                move = draw.choice(moves)
                live.play(move)
                kept.play(move)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(GROWING, instances=2),
        Scenario(TWO),
        Scenario(GROWING, instances=2, crashes=1),
    ],
    ids=["a growing group", "two gangs", "a growing group and a death"],
)
def test_it_is_the_same_search_when_everything_is_computed_again(scenario: Scenario) -> None:
    kept, again = explore(scenario), explore(scenario, _Forgetful())
    assert (kept.states, kept.moves, kept.ends) == (again.states, again.moves, again.ends)


@MANY_WAYS
@pytest.mark.parametrize("crashes", [0, 1, 2])
@pytest.mark.parametrize("preemption", ["operator", "layer", "chunk"])
def test_on_random_ways_three_overlapping_gangs_all_end(
    preemption: str, crashes: int, ways: range
) -> None:
    stops = 0
    for seed in ways:
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
            rings=draw.choice([None, (1, 3), ()]),
            policies=tuple(draw.choices(["fcfs", "edf"], k=draw.randint(0, 3))),
            cancels=tuple(draw.sample("abc", draw.randint(0, 1))),
            failures=draw.randint(0, 1),
        )
        world = World(scenario)
        try:
            stops += _wander(world, draw)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert stops > len(ways) // 3


@MANY_WAYS
@pytest.mark.parametrize("preemption", ["operator", "chunk"])
def test_on_random_ways_gangs_end_while_the_default_orders_them_anew(
    preemption: str, ways: range
) -> None:
    """As time passes, each prompt could be in time, is late, and is due before all others."""
    stops = 0
    for seed in ways:
        draw = random.Random(seed)
        prompts = [replace(one, ttft_s=draw.choice([0.5, 2.0, 9.0])) for one in THREE]
        draw.shuffle(prompts)
        scenario = Scenario(
            (*prompts, Prompt("d", 1.0, ((1,), (1, 0, 2))), Prompt("e", 0.5, ((0,),))),
            preemption=preemption,
            policy="millrace",
            passes_s=draw.choice([0.01, 0.2, 1.0]),
            crashes=draw.randint(0, 1),
            policies=tuple(draw.choices(["edf", "millrace"], k=draw.randint(0, 2))),
        )
        world = World(scenario)
        try:
            stops += _wander(world, draw)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert stops > len(ways) // 8


def _wander(world: World, draw: random.Random) -> int:
    """Plays moves until none is left. Some links are slow for a while, some instances."""
    steps = 0
    while moves := world.moves():
        if draw.random() < 0.97:
            moves = [move for move in moves if move[0] not in ACCIDENTS] or moves
        if all(move[0] in ACCIDENTS for move in moves):
            break
        world.play(draw.choice(moves[: draw.randint(1, len(moves))]))
        steps += 1
        assert steps < 5000, "this goes on for ever"
    world.check_end()
    return world.stops
