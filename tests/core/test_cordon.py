"""Instances that get no new work for a while: what waits goes elsewhere, what runs stays."""

from __future__ import annotations

import json

import pytest

from millrace.core import recorded
from millrace.core.config import SchedulerConfig
from millrace.core.effects import AdmitDecode, CancelOn, Place, Refuse, RunPrefill
from millrace.core.errors import IntegrityError
from millrace.core.events import InstanceCordoned
from millrace.core.machine import Machine
from millrace.core.request import RequestState
from support.core_events import Bench, instance, of


def bench(*names: str, tasks_ahead: int = 1, **card: object) -> Bench:
    """One task an instance: whatever else is placed waits in the pool's line."""
    config = SchedulerConfig(policy="fcfs", preemption="none", tasks_ahead=tasks_ahead)
    return Bench(*(instance(name, **card) for name in names), config=config)


def homes(found: list) -> dict[str, str]:
    return {effect.request_id: effect.decode_id for effect in of(Place, found)}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_cordoned_instance_gets_no_new_work_until_the_cordon_is_lifted(role):
    b = bench("p0", "d0")
    name = "p0" if role == "prefill" else "d0"
    b.cordon(name)
    (refused,) = of(Refuse, b.submit("a"))
    assert refused.code == "unavailable" and f"no {role} instance" in refused.message
    b.cordon(name, False)
    found = b.submit("b")
    assert homes(found) == {"b": "d0"} and of(RunPrefill, found)


def test_what_it_has_may_finish():
    b = bench("p0", "d0")
    b.submit("a")
    assert not of(CancelOn, b.cordon("p0")) and not of(CancelOn, b.cordon("d0"))
    b.serve("a")
    assert not b.machine.requests
    instances = b.machine.cluster.instances
    assert all(not one.holdings and one.draining for one in instances.values())


def test_work_goes_on_the_moment_the_cordon_is_lifted():
    b = bench("p0", "p1", "d0")
    b.submit("a")
    b.cordon("p1")
    assert not of(RunPrefill, b.submit("b"))
    (run,) = of(RunPrefill, b.cordon("p1", False))
    assert (run.request_id, run.instance_id) == ("b", "p1")


def test_a_lifted_cordon_puts_no_work_on_an_instance_that_leaves():
    b = bench("p0", "d0", "d1")
    b.cordon("d0")
    b.drains("d0")
    b.cordon("d0", False)
    assert b.machine.cluster.instances["d0"].draining
    assert homes(b.submit("a")) == {"a": "d1"}
    b = bench("p0", "d0", "d1")
    b.drains("d0")
    b.cordon("d0")
    b.cordon("d0", False)
    assert homes(b.submit("a")) == {"a": "d1"}


def test_the_next_life_is_not_cordoned():
    b = bench("p0", "d0", "d1")
    b.cordon("d0")
    b.step(instance("d0", generation=2))
    assert homes(b.submit("a")) == {"a": "d0"}


def test_the_word_of_an_earlier_life_changes_nothing():
    b = bench("p0", "d0")
    ignored = b.machine.ignored
    b.step(InstanceCordoned(instance_id="d0", generation=0, cordoned=True))
    b.step(InstanceCordoned(instance_id="d9", generation=1, cordoned=True))
    assert b.machine.ignored == ignored + 2
    assert homes(b.submit("a")) == {"a": "d0"}


def waiting(*names: str, count: int = 3, **card: object) -> Bench:
    """All prefill work is "first"; the others wait in the line, placed in turn."""
    b = bench("p0", *names, **card)
    b.submit("first")
    for number in range(count):
        b.submit(f"r{number}")
    return b


def test_requests_whose_prefill_has_not_begun_move_to_another_home():
    b = waiting("d0", "d1")
    assert homes(b.all) == {"first": "d0", "r0": "d1", "r1": "d0", "r2": "d1"}
    found = b.cordon("d0")
    assert homes(found) == {"r1": "d1"}
    (cancel,) = of(CancelOn, found)
    assert (cancel.instance_id, cancel.request_id) == ("d0", "r1")
    assert cancel.reason == "decode d0 takes no new work"
    (admit,) = of(AdmitDecode, found)
    assert (admit.instance_id, admit.attempt) == ("d1", 2)
    assert b.machine.requests["first"].decode_id == "d0"  # it runs


def test_moved_requests_keep_their_turn():
    b = waiting("d0", "d1")
    b.cordon("d0")
    b.computed("p0", "first")
    assert [run.request_id for run in of(RunPrefill, b.all)] == ["first", "r0"]
    b.computed("p0", "r0")
    assert [run.request_id for run in of(RunPrefill, b.all)] == ["first", "r0", "r1"]


def test_however_many_move_one_round_decides_who_computes():
    """A round ranks the whole line: one for each would keep the scheduler busy for seconds."""
    b = waiting("d0", "d1", count=20, pages=1000)
    rounds = b.machine.rounds
    assert len(homes(b.cordon("d0"))) == 10
    assert b.machine.rounds == rounds + 1


def test_a_drain_of_its_own_moves_them_too():
    b = waiting("d0", "d1")
    assert homes(b.drains("d0")) == {"r1": "d1"}


def test_lifting_a_cordon_moves_nothing():
    b = waiting("d0", "d1")
    assert not homes(b.cordon("d0", False))  # there was none
    b.cordon("d0")
    assert not homes(b.cordon("d0", False))


def test_a_cordoned_prefill_instance_moves_nobodys_home():
    b = waiting("d0", "d1")
    b.step(instance("p1"))
    before = {r.id: r.decode_id for r in b.machine.requests.values()}
    assert not homes(b.cordon("p1"))
    assert {r.id: r.decode_id for r in b.machine.requests.values()} == before


@pytest.mark.parametrize("pages, moved", [(7, 0), (15, 1), (16, 2), (100, 4)])
def test_who_would_only_wait_elsewhere_stays(pages, moved):
    """Each takes 8 pages: 128 tokens."""
    b = waiting("d0", count=4)
    b.step(instance("d1", pages=pages))
    names = [f"r{number}" for number in range(4)]
    assert homes(b.cordon("d0")) == dict.fromkeys(names[:moved], "d1")
    stay = [r.id for r in b.machine.requests.values() if r.decode_id == "d0"]
    assert stay == ["first", *names[moved:]]


def test_what_decode_keeps_of_an_earlier_attempt_stays_where_it_is():
    b = bench("p0", "d0", "d1")
    b.submit("a", 200)
    b.chunk_started("p0", "a")
    b.landed("a", 150)
    b.step(instance("p1"))
    b.submit("b")  # p1 has a task
    b.died("p0")
    request = b.machine.requests["a"]
    assert (request.state, request.kept_tokens) == (RequestState.QUEUED, 150)
    b.cordon("d0")
    assert (request.decode_id, request.kept_tokens) == ("d0", 150)


def test_the_last_home_of_a_model_hands_over_to_the_next_revision():
    """A pool without a decode instance places nothing: what waits there goes to the other pool."""
    b = bench("p0", "d0")
    b.submit("first")
    b.submit("r0")
    b.step(instance("p1", model="next"))
    b.step(instance("d1", model="next"))
    found = b.cordon("d0")
    assert homes(found) == {"r0": "d1"}
    (run,) = of(RunPrefill, found)
    assert (run.instance_id, run.decode_id) == ("p1", "d1")


def test_an_instance_that_was_away_is_planned_with_again():
    """The board knows its members by bits: one that comes back has its own."""
    b = bench("p0", "p1", "d0")
    for number in range(6):
        b.cordon("p1" if number % 2 else "p0")
        b.submit(f"r{number}")
        b.cordon("p1" if number % 2 else "p0", False)
    sent = {run.instance_id for run in of(RunPrefill, b.all)}
    assert sent == {"p0", "p1"}


def test_recorded_cordons_are_replayed_to_the_same_decisions():
    one, other = waiting("d0", "d1"), waiting("d0", "d1")
    for name, cordoned in (("d0", True), ("d0", False), ("p0", True)):
        event = InstanceCordoned(instance_id=name, generation=1, cordoned=cordoned)
        again = recorded.event_of(json.loads(json.dumps(recorded.plain_event(event))))
        assert again == event
        assert other.step(again) == one.step(event)


def test_integrity_watches_over_those_that_leave():
    machine = Machine(SchedulerConfig())
    machine.step(instance("d0"), 0.0)
    machine.check_integrity()
    machine.cluster.instances["d0"].leaving = True
    with pytest.raises(IntegrityError, match="d0: drains"):
        machine.check_integrity()
