"""The drain rule: every transition alone, then random histories of a fleet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.autoscale.drain import (
    Action,
    Cordon,
    DrainPolicy,
    Evict,
    Instance,
    OnTimeout,
    Registration,
    Remove,
    Resize,
    Uncordon,
    drain_actions,
    resize,
)

TIMEOUT_S, EVICTION_S = 100.0, 60.0
LATE_S = TIMEOUT_S + EVICTION_S
MIGRATE, ABORT, WAIT = (
    DrainPolicy(timeout_s=TIMEOUT_S, eviction_s=EVICTION_S, on_timeout=on_timeout)
    for on_timeout in (OnTimeout.MIGRATE, OnTimeout.ABORT, OnTimeout.WAIT)
)
NAME = "i"
CORDON, UNCORDON, REMOVE = (kind(instance_id=NAME) for kind in (Cordon, Uncordon, Remove))
MOVE, FAIL = (Evict(instance_id=NAME, abort=abort) for abort in (False, True))


def held(requests: int, *, cordoned: bool = True) -> Registration:
    return Registration(cordoned=cordoned, held_requests=requests)


def leaving(registration: Registration | None, *, ready: bool = True) -> Instance:
    """Returns an instance that leaves since 0 s."""
    return Instance(id=NAME, ready=ready, leaves_since_s=0.0, registration=registration)


def actions(
    instance: Instance, now_s: float = 0.0, policy: DrainPolicy = MIGRATE, *, answers: bool = True
) -> list[Action]:
    return drain_actions([instance], policy, now_s, scheduler_answers=answers)


@pytest.mark.parametrize("requests", [0, 3])
def test_a_leaving_instance_is_cordoned_first(requests):
    assert actions(leaving(held(requests, cordoned=False))) == [CORDON]
    assert actions(leaving(held(requests, cordoned=False)), TIMEOUT_S - 1) == [CORDON]


def test_a_cordoned_instance_goes_when_it_holds_nothing():
    assert actions(leaving(held(1))) == []
    assert actions(leaving(held(0))) == [REMOVE]


@pytest.mark.parametrize("policy, evict", [(MIGRATE, [MOVE]), (ABORT, [FAIL]), (WAIT, [])])
def test_requests_of_a_late_instance(policy, evict):
    """Evictions come in each pass, and time removes the instance at last, except with Wait."""
    late = leaving(held(2))
    assert actions(late, TIMEOUT_S - 1, policy) == []
    assert actions(late, TIMEOUT_S, policy) == evict
    assert actions(late, LATE_S - 1, policy) == evict
    assert actions(late, LATE_S, policy) == ([REMOVE, *evict] if evict else [])


def test_an_instance_that_registers_again_is_cordoned_again_and_its_time_goes_on():
    assert actions(leaving(held(1, cordoned=False)), TIMEOUT_S) == [CORDON, MOVE]
    assert actions(leaving(held(1, cordoned=False)), LATE_S) == [REMOVE, CORDON, MOVE]


def test_an_empty_instance_without_a_cordon_outlives_every_deadline():
    """Its cordon takes one pass; until then requests may be in flight to it."""
    assert actions(leaving(held(0, cordoned=False)), 10 * LATE_S) == [CORDON]


@pytest.mark.parametrize("policy", [MIGRATE, WAIT])
def test_an_instance_that_starts_or_died_goes_at_once(policy):
    assert actions(leaving(None, ready=False), policy=policy) == [REMOVE]
    assert actions(leaving(held(0, cordoned=False), ready=False), policy=policy) == [REMOVE, CORDON]
    assert actions(leaving(held(1), ready=False), policy=policy) == []


@pytest.mark.parametrize("ready, answers", [(True, True), (True, False), (False, False)])
def test_an_instance_of_which_nothing_is_known_waits_for_the_timeout(ready, answers):
    """The instance is ready and will register again, or the scheduler does not answer."""
    unknown = leaving(None, ready=ready)
    assert actions(unknown, TIMEOUT_S - 1, answers=answers) == []
    assert actions(unknown, TIMEOUT_S, answers=answers) == [REMOVE]
    assert actions(unknown, 10 * LATE_S, WAIT, answers=answers) == []


def test_an_instance_that_stays_is_uncordoned_when_it_is_there_and_the_cordon_is_its_pools():
    stays = Instance(id=NAME, ready=True, registration=held(1))
    assert actions(stays) == [UNCORDON]
    assert actions(replace(stays, registration=held(1, cordoned=False))) == []
    assert actions(replace(stays, registration=None)) == []
    assert actions(replace(stays, ready=False)) == []
    assert actions(replace(stays, cordon_is_own=False)) == []


def test_removals_come_first_then_capacity_and_evictions_last():
    fleet = [
        replace(leaving(held(1, cordoned=False)), id="late"),
        Instance(id="stays", ready=True, registration=held(1)),
        replace(leaving(held(0)), id="empty"),
    ]
    found = drain_actions(fleet, MIGRATE, TIMEOUT_S, scheduler_answers=True)
    assert found == [
        Remove(instance_id="empty"),
        Uncordon(instance_id="stays"),
        Cordon(instance_id="late"),
        Evict(instance_id="late", abort=False),
    ]


# ---- who leaves


def instance(name: str, requests: int | None, since_s: float | None = None) -> Instance:
    registration = None if requests is None else held(requests, cordoned=since_s is not None)
    return Instance(id=name, ready=True, leaves_since_s=since_s, registration=registration)


def test_unregistered_instances_leave_first_then_the_least_held_of_equals_the_youngest():
    fleet = [instance("a", 0), instance("b", 2), instance("c", None), instance("d", 0)]
    assert [resize(fleet, size).leave for size in (4, 3, 2, 1, 0)] == [
        (),
        ("c",),
        ("c", "d"),
        ("c", "d", "a"),
        ("c", "d", "a", "b"),
    ]


def test_the_fullest_drain_is_cancelled_first_of_equals_the_oldest():
    fleet = [instance("a", 1, 2.0), instance("b", 3, 9.0), instance("c", 1, 5.0), instance("d", 0)]
    assert resize(fleet, 1) == Resize(start=0)
    assert resize(fleet, 3) == Resize(start=0, stay=("b", "a"))
    assert resize(fleet, 6) == Resize(start=2, stay=("b", "a", "c"))


# ---- random histories of a fleet


@dataclass
class Process:
    id: str
    ready: bool = False
    registered: bool = False
    cordoned: bool = False
    requests: int = 0
    leaves_since_s: float | None = None

    def seen(self, *, answers: bool) -> Instance:
        known = Registration(cordoned=self.cordoned, held_requests=self.requests)
        return Instance(
            id=self.id,
            ready=self.ready,
            leaves_since_s=self.leaves_since_s,
            registration=known if self.registered and answers else None,
        )

    def die(self) -> None:
        self.ready = self.registered = self.cordoned = False
        self.requests = 0


@dataclass
class Fleet:
    """A pool with a connector, which carries out as many actions of a pass as the test allows."""

    policy: DrainPolicy
    minimum: int
    answers: bool = True
    now_s: float = 0.0
    there: dict[str, Process] = field(default_factory=dict)
    made: int = 0

    def seen(self) -> list[Instance]:
        return [process.seen(answers=self.answers) for process in self.there.values()]

    def staying(self) -> list[Process]:
        return [process for process in self.there.values() if process.leaves_since_s is None]

    def resize(self, size: int) -> None:
        change = resize(self.seen(), size)
        assert not (change.leave and (change.stay or change.start))
        for name in change.stay:
            self.there[name].leaves_since_s = None
        for name in change.leave:
            self.there[name].leaves_since_s = self.now_s
        for _ in range(change.start):
            self.there[f"i{self.made}"] = Process(id=f"i{self.made}")
            self.made += 1
        assert len(self.staying()) == size

    def settle(self, most: int = 1000) -> list[Action]:
        found = drain_actions(self.seen(), self.policy, self.now_s, scheduler_answers=self.answers)
        for action in found[:most]:
            self.carry_out(action)
        return found

    def carry_out(self, action: Action) -> None:
        process = self.there.get(action.instance_id)
        if process is None:
            return  # removed in the same pass
        assert isinstance(action, Remove) or (self.answers and process.registered)
        since_s = process.leaves_since_s
        waited_s = -1.0 if since_s is None else self.now_s - since_s
        match action:
            case Uncordon():
                assert since_s is None and process.cordoned
                process.cordoned = False
            case Cordon():
                assert since_s is not None and not process.cordoned
                process.cordoned = True
                assert sum(not p.cordoned for p in self.staying()) >= self.minimum
            case Evict(abort=abort):
                assert process.requests and waited_s >= TIMEOUT_S
                assert self.policy is (ABORT if abort else MIGRATE)
                process.requests = 0
            case Remove():
                assert since_s is not None
                if process.requests:
                    deadline_s = LATE_S if process.registered and self.answers else TIMEOUT_S
                    assert self.policy is not WAIT and waited_s >= deadline_s
                elif process.registered and process.ready and self.answers:
                    assert process.cordoned, "requests may be in flight to it"
                del self.there[process.id]

    def happen(self, event: tuple) -> None:
        match event:
            case ("time", seconds):
                self.now_s += seconds
            case ("size", more):
                self.resize(self.minimum + more)
            case ("scheduler", answers):
                self.answers = answers
            case ("scheduler restarts",):
                for process in self.there.values():
                    process.registered = process.cordoned = False
            case (what, index) if self.there:
                self.befall(what, list(self.there.values())[index % len(self.there)])

    def befall(self, what: str, process: Process) -> None:
        if what == "dies":
            process.die()
        elif what == "starts":
            process.ready = True
        elif what == "registers" and process.ready and not process.registered:
            process.registered, process.cordoned = True, False
        elif what == "works" and process.registered and not process.cordoned:
            process.requests += 1
        elif what == "finishes" and process.requests:
            process.requests -= 1


INDEX = st.integers(0, 7)
EVENT = st.one_of(
    st.tuples(st.just("time"), st.sampled_from([1.0, 30.0, TIMEOUT_S, LATE_S])),
    st.tuples(st.just("size"), st.integers(0, 4)),
    st.tuples(st.just("scheduler"), st.booleans()),
    st.tuples(st.just("scheduler restarts")),
    *(
        st.tuples(st.just(what), INDEX)
        for what in ("dies", "starts", "registers", "works", "finishes")
    ),
)
POLICIES = st.sampled_from([MIGRATE, ABORT, WAIT])


@settings(max_examples=60)
@given(POLICIES, st.integers(0, 3), st.lists(st.tuples(EVENT, st.integers(0, 4)), max_size=60))
def test_any_life(policy, minimum, life):
    """No request is lost before its deadline, no cordon falls below the minimum, and the pool
    settles.

    The connector carries out only some actions of each pass; `Fleet.carry_out` checks each action.
    """
    fleet = Fleet(policy, minimum)
    fleet.resize(minimum + 2)
    for event, most in life:
        fleet.happen(event)
        fleet.settle(most)
    fleet.answers = True
    for _ in range(3):  # cordon, remove, uncordon: each takes at most one pass
        for process in fleet.there.values():
            process.ready = process.registered = True
            process.requests = 0
        fleet.settle()
    assert fleet.settle() == []
    assert len(fleet.there) == len(fleet.staying()) >= minimum
    assert not any(process.cordoned for process in fleet.there.values())


REGISTRATIONS = st.one_of(
    st.none(),
    st.builds(Registration, cordoned=st.booleans(), held_requests=st.integers(0, 3)),
)
INSTANCES = st.builds(
    Instance,
    id=st.uuids().map(str),
    ready=st.booleans(),
    leaves_since_s=st.none() | st.floats(-2 * LATE_S, 0.0),
    registration=REGISTRATIONS,
    cordon_is_own=st.booleans(),
)


@given(st.lists(INSTANCES, max_size=6), POLICIES)
def test_one_instance_never_changes_what_happens_to_another(fleet, policy):
    together = drain_actions(fleet, policy, 0.0, scheduler_answers=True)
    alone = [drain_actions([one], policy, 0.0, scheduler_answers=True) for one in fleet]
    assert {*together} == {action for found in alone for action in found}


@given(st.lists(INSTANCES, max_size=6), st.integers(0, 8))
def test_a_size_is_met_exactly_with_the_fewest_changes(fleet, size):
    change = resize(fleet, size)
    staying = {one.id for one in fleet if one.leaves_since_s is None}
    drains = {one.id for one in fleet} - staying
    assert {*change.leave} <= staying and {*change.stay} <= drains
    assert len(staying) - len(change.leave) + len(change.stay) + change.start == size
    assert not change.leave or not (change.stay or change.start)
    assert not change.start or {*change.stay} == drains
