"""A gang's protocol: start and stop together (FlowPrefill section 5.1)."""

from __future__ import annotations

from collections import deque

import pytest

from core.instance.gang_node import ModelTask
from millrace.core.errors import IntegrityError, TransferError
from millrace.core.instance.gang import (
    CHANNEL,
    Gang,
    GangKey,
    GangSpec,
    Message,
    MessageKind,
    State,
    Step,
    answer_without_task,
)
from millrace.core.instance.preemption import PreemptionRule
from millrace.core.instance.stop_point import StopPoint

KEY = GangKey("r", 1, 2)
OPERATOR, LAYER, PASS = StopPoint.OPERATOR, StopPoint.LAYER, StopPoint.PASS
STOPS = (PASS, OPERATOR, OPERATOR, LAYER, OPERATOR, LAYER)


class Three:
    """A gang of three. Their messages wait on their links until `deliver`."""

    def __init__(self, last_stop: int = 5) -> None:
        self.finest = dict.fromkeys("abc", OPERATOR)
        self.links: dict[tuple[str, str], deque[Message]] = {}
        self.gangs = {
            me: Gang(
                GangSpec(
                    key=KEY, members=tuple("abc"), me=me, stops=bytes(STOPS), last_stop=last_stop
                ),
                lambda to, message, me=me: self._say(me, to, message),
                lambda me=me: self.finest[me],
            )
            for me in "abc"
        }
        self.a, self.b, self.c = self.gangs.values()

    def _say(self, sender: str, to: str, message: Message) -> None:
        self.links.setdefault((sender, to), deque()).append(message)

    def deliver(self, *links: str) -> None:
        """Delivers all messages on these links ("ab": from a to b), or on all until none is
        left."""
        chosen = [tuple(link) for link in links] or list(self.links)
        while any(self.links.get(link) for link in chosen):
            for sender, to in chosen:
                while self.links.get((sender, to)):
                    self.gangs[to].hear(sender, self.links[sender, to].popleft())
            chosen = chosen if links else list(self.links)

    def start(self) -> None:
        for gang in self.gangs.values():
            gang.be_ready()
        self.deliver()

    def states(self) -> set[State]:
        return {gang.state for gang in self.gangs.values()}


def test_it_starts_when_all_are_ready() -> None:
    three = Three()
    three.b.be_ready()
    three.a.be_ready()
    three.deliver()
    assert three.a.state is State.READY and three.c.state is State.AWAY
    three.c.be_ready()
    three.deliver()
    assert three.states() == {State.RUNNING}


def test_who_withdraws_is_released_or_started() -> None:
    three = Three()
    three.b.be_ready()
    three.b.withdraw()
    three.deliver()
    assert three.b.state is State.AWAY
    three.start()
    other = Three()
    for gang in other.gangs.values():
        gang.be_ready()
    other.b.withdraw()
    other.deliver("ca")
    other.gangs["a"].hear("b", other.links["b", "a"].popleft())  # READY: START is on its way
    other.deliver()
    assert other.states() == {State.RUNNING}


def test_all_stop_at_the_first_position_that_nobody_is_past() -> None:
    three = Three()
    three.start()
    for _ in range(2):
        assert three.c.begin() is Step.BEGIN
    assert three.a.begin() is Step.BEGIN
    three.b.ask_stop()
    three.deliver("ba", "ac", "ab")
    assert three.c.begin() is Step.WAIT
    three.deliver()
    assert [gang.stop_at for gang in three.gangs.values()] == [2, 2, 2]
    for gang in three.gangs.values():
        while gang.begin() is Step.BEGIN:
            pass
        assert (gang.begin(), gang.begun) == (Step.STOP, 2)
        gang.leave()


@pytest.mark.parametrize(
    ("finest", "last_stop", "stop"), [(LAYER, 5, 3), (PASS, 5, 6), (LAYER, 2, 6), (OPERATOR, 5, 1)]
)
def test_the_stop_is_one_that_every_member_allows(
    finest: StopPoint, last_stop: int, stop: int
) -> None:
    """6 is the end: they run on."""
    three = Three(last_stop)
    three.start()
    three.finest["c"] = finest
    assert three.b.begin() is Step.BEGIN
    three.c.ask_stop()
    three.a.ask_stop()
    three.deliver()
    assert {gang.stop_at for gang in three.gangs.values()} == {stop}


def test_a_leader_that_cannot_stop_any_more_holds_nobody() -> None:
    three = Three(last_stop=0)
    three.start()
    assert three.a.begin() is Step.BEGIN
    three.b.ask_stop()
    three.deliver()
    assert three.states() == {State.RUNNING} and three.b.stop_at is None


def test_a_member_that_is_further_on_may_be_ready_again_before_the_leader_has_stopped() -> None:
    three = Three()
    three.start()
    three.b.ask_stop()
    three.deliver()
    three.b.leave()
    three.b.be_ready()
    three.b.withdraw()
    three.deliver()
    assert three.b.state is State.AWAY
    three.b.be_ready()
    three.deliver()
    for gang in (three.a, three.c):
        gang.leave()
        gang.be_ready()
    three.deliver()
    assert three.states() == {State.RUNNING}


def test_a_gang_is_open_once_all_members_have_said_that_they_have_the_task() -> None:
    three = Three()
    three.b.enter()
    three.links.clear()  # the leader is not linked to b yet
    three.c.enter()
    three.a.enter()
    three.deliver("ca")
    assert not any(gang.is_open for gang in three.gangs.values())
    three.deliver()
    assert all(gang.is_open for gang in three.gangs.values())


def test_a_call_that_came_too_early_for_a_member_is_made_up_for_by_its_own_word() -> None:
    three = Three()
    three.a.enter()
    three.links.pop(("a", "b"))  # b has no task and no link yet
    three.c.enter()
    three.deliver()
    assert not three.a.is_open
    three.b.enter()
    three.deliver()
    assert all(gang.is_open for gang in three.gangs.values())


def test_a_member_that_ended_leaves_nobody_holding() -> None:
    answer = answer_without_task(Message(KEY, MessageKind.HOLD))
    three = Three()
    three.start()
    three.c.ask_stop()
    three.deliver("ca", "ab")
    assert answer is not None
    three.links["a", "c"].clear()
    three.gangs["a"].hear("c", answer)
    three.deliver()
    assert three.a.stop_at == three.b.stop_at == len(STOPS)


def test_messages_come_back_as_they_went() -> None:
    message = Message(GangKey("ümlaut", 3, 7), MessageKind.HELD, 2**32 - 1, LAYER)
    assert Message.decode(message.encode()) == message
    assert message.encode()[0] == CHANNEL


@pytest.mark.parametrize("payload", [b"", b"\4\1", b"\3" + bytes(14), b"\4\x63" + bytes(13)])
def test_anything_else_is_refused(payload: bytes) -> None:
    with pytest.raises(TransferError, match="not a gang's message"):
        Message.decode(payload)


def test_a_spec_names_what_contradicts() -> None:
    with pytest.raises(ValueError, match="'z'"):
        GangSpec(key=KEY, members=("a", "b"), me="z", stops=b"\2", last_stop=0)
    with pytest.raises(ValueError, match="last_stop 1 "):
        GangSpec(key=KEY, members=("a", "b"), me="a", stops=b"\2", last_stop=1)


def test_a_task_that_does_not_run_what_its_stops_say_is_found() -> None:
    spec = Three().a.spec
    spec.check(3, LAYER)
    with pytest.raises(IntegrityError, match="LAYER ends before operator 2"):
        spec.check(2, LAYER)
    with pytest.raises(IntegrityError, match="nothing"):
        spec.check(6, LAYER)


def test_a_gang_keeps_its_turn_from_its_opening_on_also_without_preemption() -> None:
    """A member that joins at a later chunk has its task while the others compute earlier chunks."""
    spec = GangSpec(key=KEY, members=("p", "q"), me="q", stops=bytes(STOPS), last_stop=5)
    gang, first, second = (
        ModelTask("r/2", spec, "r", 2),
        ModelTask("s/0", None, "s", 0),
        ModelTask("t/0", None, "t", 0),
    )
    rule: PreemptionRule[ModelTask] = PreemptionRule(0)  # without preemption
    rule.order([gang.name, first.name, second.name])
    for task in (gang, first, second):
        rule.add(task)
    assert rule.next() is first
    rule.receive("p", Message(KEY, MessageKind.OPEN).encode())
    assert not rule.leaves(first, PASS)
    rule.remove(first)
    assert rule.next() is None  # the second waits for the gang
    rule.receive("p", Message(KEY, MessageKind.START).encode())
    assert rule.next() is gang
