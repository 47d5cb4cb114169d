"""Instances that die in the middle of their work, and return."""

from __future__ import annotations

import pytest

from millrace.core.config import SchedulerConfig
from millrace.sim.cluster.spec import Failure
from support.simulation import Run, planned, prefill_s, toy_spec


def dies(name: str, at_s: float, down_s: float = 5.0) -> tuple[Failure, ...]:
    return (Failure(at_s=at_s, instance_id=name, down_s=down_s),)


def test_a_prefill_that_dies_is_begun_anew_elsewhere():
    spec = toy_spec(prefill=2, failures=dies("p0", 0.1))
    record = Run(spec, [planned(0, 0.0, 8000, 5)]).records[0]
    assert record.attempts == 2
    assert record.ttft_s == pytest.approx(0.1 + prefill_s(8000))


def test_alone_it_waits_for_its_return():
    spec = toy_spec(failures=dies("p0", 0.1, down_s=2.0))
    record = Run(spec, [planned(0, 0.0, 8000, 5)]).records[0]
    assert record.ttft_s == pytest.approx(2.1 + prefill_s(8000))


def test_a_decode_that_dies_takes_its_requests_with_it():
    spec = toy_spec(decode=2, failures=dies("d0", 1.0))
    run = Run(spec, [planned(0, 0.0, 100, 1000), planned(1, 0.0, 100, 1000)])
    assert sorted(record.error for record in run.records.values()) == ["", "failed"]


def test_a_decode_that_dies_during_prefill_costs_a_prefill():
    spec = toy_spec(decode=2, failures=dies("d0", 0.1))
    record = Run(spec, [planned(0, 0.0, 8000, 5)]).records[0]
    assert (record.error, record.attempts) == ("", 2)


def test_a_member_of_a_group_frees_the_others():
    config = SchedulerConfig(planner="fixed_sp", fixed_sp=2)
    spec = toy_spec(config, prefill=4, failures=dies("p1", 0.1))
    run = Run(spec, [planned(0, 0.0, 8000, 1)])
    assert run.records[0].attempts == 2
    assert run.records[0].ttft_s == pytest.approx(0.1 + prefill_s(8000, sp=2), rel=0.2)


def test_a_backend_of_a_dead_transfer_is_free_again():
    spec = toy_spec(prefill=2, backends=1, max_chunk_tokens=1000, failures=dies("p0", 0.05))
    run = Run(spec, [planned(0, 0.0, 8000, 5), planned(1, 0.0, 8000, 5)])
    assert [run.records[i].error for i in range(2)] == ["", ""]


def test_failures_after_the_end_do_not_prolong_it():
    spec = toy_spec(failures=dies("p0", 1000.0))
    run = Run(spec, [planned(0, 0.0, 100, 5)])
    assert run.counters.duration_s < 10.0
    assert run.counters.instance_failures == 0


@pytest.mark.parametrize("sp", [1, 2])
def test_what_landed_is_not_computed_again(sp):
    """Passes of 1000 tokens an instance; the death comes in the middle of the third."""
    config = SchedulerConfig(planner="fixed_sp", fixed_sp=sp)
    done_s = prefill_s(2000 * sp, sp=sp)
    dies_s = (done_s + prefill_s(3000 * sp, sp=sp)) / 2
    spec = toy_spec(config, prefill=2 * sp, max_chunk_tokens=1000, failures=dies("p0", dies_s))
    record = Run(spec, [planned(0, 0.0, 8000, 5)]).records[0]
    assert record.attempts == 2
    rest_s = prefill_s(8000 - 2000 * sp, 2000 * sp, sp)
    assert dies_s + rest_s <= record.ttft_s < dies_s + 1.2 * rest_s
    assert record.ttft_s < dies_s + 0.9 * prefill_s(8000, sp=sp)


def test_a_prompt_outlives_more_deaths_than_it_has_attempts():
    config = SchedulerConfig(max_attempts=2)
    failures = tuple(
        Failure(at_s=0.3 * i, instance_id=f"p{i % 2}", down_s=0.25) for i in range(1, 7)
    )
    spec = toy_spec(config, prefill=2, max_chunk_tokens=1000, failures=failures)
    record = Run(spec, [planned(0, 0.0, 40_000, 5)]).records[0]
    assert record.error == "" and record.attempts > 2
