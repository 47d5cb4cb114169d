"""What an operator knows of durations: its own clock, and what another operator wrote down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from millrace_operator.observed import Ending, Pod
from millrace_operator.run.sightings import Sightings

POD = Pod(name="d-0", uid="u0", ordinal=0, template="t", unready_since="2026-01-01T00:00:00Z")
SINCE = "2026-01-01T00:00:00Z"


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def drains(since: str = SINCE, **more: Any) -> dict[str, Any]:
    return {"draining": [{"pod": "d-0", "uid": "u0", "since": since, **more}]}


def test_a_drain_lasts_from_its_first_sight_whatever_its_time_says():
    clock = Clock()
    seen = Sightings(clock)
    seen.wrote("p", drains())
    clock.now_s += 7.0
    assert seen.look("p", drains(), []).draining_since_s == {("d-0", "u0"): 50.0}
    assert seen.look("p", drains("2099-01-01T00:00:00Z"), []).draining_since_s == {
        ("d-0", "u0"): 57.0
    }
    assert seen.look("another", drains(), []).draining_since_s == {("d-0", "u0"): 57.0}


def test_another_operator_counts_on_from_what_the_status_keeps():
    found = Sightings(Clock()).look("p", drains(waitedSeconds=30), [])
    assert found.draining_since_s == {("d-0", "u0"): 20.0}


def test_one_that_returns_does_not_drain_and_begins_anew():
    clock = Clock()
    seen = Sightings(clock)
    seen.wrote("p", drains())
    assert not seen.look("p", drains(returning=True), []).draining_since_s
    clock.now_s += 7.0
    assert seen.look("p", drains(), []).draining_since_s == {("d-0", "u0"): 57.0}


def test_a_pod_is_not_ready_since_the_operator_sees_it():
    clock = Clock()
    seen = Sightings(clock)
    for _ in range(2):
        [pod] = seen.look("p", {}, [POD]).pods
        assert pod.unready_since_s == 50.0
        clock.now_s += 7.0
    again = replace(POD, unready_since="2026-01-01T00:01:00Z")
    [pod] = seen.look("p", {}, [again]).pods
    assert pod.unready_since_s == 64.0


def test_a_pods_grace_period_begins_when_the_operator_sees_its_end():
    clock = Clock()
    seen = Sightings(clock)
    going = replace(POD, endings=(Ending(name="d-0", node="n", by_s=1.0, grace_s=30.0),))
    for _ in range(2):
        [pod] = seen.look("p", {}, [going]).pods
        assert [one.due_s for one in pod.endings] == [80.0]
        clock.now_s += 7.0


def test_progress_lasts_from_its_first_sight():
    clock = Clock()
    seen = Sightings(clock)
    scaling = {"type": "Progressing", "status": "True", "lastTransitionTime": SINCE}
    status = {"conditions": [scaling]}
    seen.wrote("p", status)
    clock.now_s += 7.0
    assert seen.look("p", status, []).progressing_since_s == 50.0


def test_a_deleted_pool_is_forgotten():
    clock = Clock()
    seen = Sightings(clock)
    seen.wrote("p", drains())
    seen.forget("p")
    clock.now_s += 7.0
    assert seen.look("p", drains(), []).draining_since_s == {("d-0", "u0"): 57.0}
