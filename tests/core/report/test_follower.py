"""What a follower tells of the requests of a machine."""

from __future__ import annotations

import pytest

from millrace.core.report.follower import OutcomeFollower
from millrace.core.report.outcome import Outcome, decode_outcome
from millrace.core.scheduler import events, reports
from millrace.core.scheduler.machine import Machine
from support.core_events import instance, reported, request
from support.recorded_runs import CONFIG, steps


def followed(zero_s: float = 0.0) -> list[Outcome]:
    machine = Machine(CONFIG)
    follower = OutcomeFollower(machine, zero_s)
    found: list[Outcome] = []
    for now_s, event in steps():
        found += follower.saw(event, machine.step(event, now_s), now_s)
    assert follower.end(10.0) == []
    return found


def test_every_request_has_one_outcome_at_its_end() -> None:
    found = {one.request_id: one for one in followed()}
    assert {name: one.state for name, one in found.items()} == {
        "huge": "refused",
        "lost": "failed",
        "quick": "finished",
        "late": "finished",
        "free": "finished",
    }
    assert [one.request_id for one in followed()][:2] == ["huge", "lost"]  # as they ended
    assert [found[name].in_time for name in ("quick", "late", "free", "lost", "huge")] == [
        *(True, False, None, False, None)
    ]
    assert (found["late"].ttft_s, found["late"].objective_s) == (pytest.approx(1.5), 1.0)
    assert (found["quick"].model, found["huge"].model) == ("h", "")


def test_late_requests_alone_say_why() -> None:
    found = {one.request_id: one for one in followed()}
    assert found["late"].waited and found["late"].helps
    assert not found["quick"].waited and not found["quick"].helps


def test_times_count_from_the_given_time() -> None:
    arrived = {one.request_id: one.arrived_s for one in followed(zero_s=-100.0)}
    assert arrived["lost"] == pytest.approx(104.0)


def test_outcomes_are_read_as_they_were_written() -> None:
    for one in followed():
        assert decode_outcome(one.encoded()) == one


def test_a_new_leader_follows_what_it_has_taken_over() -> None:
    machine = Machine(CONFIG)
    follower = OutcomeFollower(machine, 0.0)
    named = request("r", 100, arrival_s=1.0, ttft_s=9.0).request
    found: list[Outcome] = []
    for now_s, event in (
        (0.0, events.TakeoverBegan()),
        (0.0, instance("p0")),
        (0.0, instance("d0")),
        (1.0, events.Reopened(request=named)),
        (2.0, events.TakeoverEnded()),
        (
            7.0,
            reported(
                "d0",
                reports.RequestFailed(request_id="r", attempt=0, message="bad", retryable=False),
            ),
        ),
    ):
        found += follower.saw(event, machine.step(event, now_s), now_s)
    [one] = found
    assert (one.request_id, one.state) == ("r", "failed")
