"""A report of what a live scheduler has noted is the report of its recording."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.core.report.follower import OutcomeFollower
from millrace.core.report.outcome import Outcome
from millrace.core.report.pool_sample import PoolSample, TimedSample
from millrace.core.scheduler.machine import Machine
from millrace.sim.reports.recorded import EmptyRange, report_of_recording
from millrace.sim.reports.stored import report_of_outcomes
from support.recorded_runs import BEGAN_UNIX_S, CONFIG, recorded_run, steps


@pytest.fixture(scope="module")
def noted() -> list[Outcome]:
    machine = Machine(CONFIG)
    follower = OutcomeFollower(machine, -BEGAN_UNIX_S)
    return [
        outcome
        for now_s, event in steps()
        for outcome in follower.saw(event, machine.step(event, now_s), now_s)
    ]


def test_it_says_what_the_recording_says(noted: list[Outcome], tmp_path: Path) -> None:
    of_recording = report_of_recording(recorded_run(tmp_path / "run.jsonl"))
    found = report_of_outcomes(noted, [], began_unix_s=BEGAN_UNIX_S)
    assert found.total == pytest.approx(of_recording.total)
    assert found.classes.keys() == of_recording.classes.keys()
    assert found.tenants.keys() == of_recording.tenants.keys()
    assert found.models.keys() == of_recording.models.keys()
    assert [one.request_id for one in found.worst] == ["lost", "late"]
    assert found.late_waited_s == pytest.approx(of_recording.late_waited_s)
    assert sum(slot.requests for slot in found.slots) == 5
    assert found.notes == ["the pools have no sample in this time"]


def test_pools_are_those_of_the_range(noted: list[Outcome]) -> None:
    samples = [
        TimedSample(
            at_s=BEGAN_UNIX_S + at_s,
            sample=PoolSample(role="prefill", instances=size, in_use=0.5, wanted=size, reason="x"),
        )
        for at_s, size in ((1.0, 1), (2.0, 2), (3.0, 3))
    ]
    found = report_of_outcomes(noted, samples, began_unix_s=BEGAN_UNIX_S, from_s=2.5)
    [row] = found.pools
    assert (row.instances, row.wanted, row.advice) == (3, 3, "keep it")
    assert found.total.requests == 2
    assert found.notes == []


def test_an_empty_range_is_an_error(noted: list[Outcome]) -> None:
    with pytest.raises(EmptyRange, match="no request came from 90 s on; Redis has 5"):
        report_of_outcomes(noted, [], began_unix_s=BEGAN_UNIX_S, from_s=90.0)
