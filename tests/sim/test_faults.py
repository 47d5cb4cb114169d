"""Instances that die in the middle of their work, and return; and instances that fail it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.errors import ConfigError
from millrace.sim.cluster.spec import Errors, Failure, Slowness
from millrace.sim.workload.workload import PlannedRequest
from support.seeds import seeds
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


def chats(requests: int, rate_rps: float, seed: int = 0) -> Iterator[PlannedRequest]:
    """Poisson arrivals of prompts of 500 to 4000 tokens: 60 ms of an instance each, on average."""
    draws = random.Random(seed)
    arrivals = itertools.accumulate(draws.expovariate(rate_rps) for _ in range(requests))
    for index, arrival_s in enumerate(arrivals):
        yield planned(index, arrival_s, draws.choice([500, 1000, 2000, 4000]), 20)


def failed_of(run: Run) -> int:
    return sum(record.error == "failed" for record in run.records.values())


@pytest.mark.parametrize("seed", seeds(1, 3))
@pytest.mark.parametrize(("share", "least_off", "ratio"), [(1.0, 400, 0.05), (0.3, 100, 0.8)])
def test_breakers_spare_requests_an_instance_that_errs(
    share: float, least_off: int, ratio: float, seed: int
) -> None:
    """It fails fast, so it is free more often than others: without breakers it gets most of the
    600 requests that come meanwhile. Breakers count errors in a row: few errors open them late.
    """

    def played(breaker_errors: int) -> Run:
        spec = toy_spec(
            SchedulerConfig(breaker_errors=breaker_errors),
            prefill=4,
            decode=2,
            seed=seed,
            errors=(Errors(at_s=5.0, instance_id="p1", for_s=30.0, share=share),),
        )
        return Run(spec, chats(1000, 20.0, seed))

    off, on = played(0), played(3)
    assert off.counters.breaker_openings == 0
    assert failed_of(off) > least_off, failed_of(off)
    assert on.counters.breaker_openings >= 1
    assert failed_of(on) < ratio * failed_of(off), (failed_of(on), failed_of(off))
    for run in (off, on):
        assert failed_of(run) == run.counters.failed_chunks == run.counters.failed


def test_an_instance_that_has_recovered_gets_its_share_again() -> None:
    errors = (Errors(at_s=0.0, instance_id="p1", for_s=10.0),)
    spec = toy_spec(SchedulerConfig(), prefill=2, decode=2, errors=errors)
    run = Run(spec, chats(2000, 10.0))
    assert run.simulation.machine.breakers.open == 0
    assert 3 <= failed_of(run) < 20
    assert run.counters.busy_share["prefill"] > 0.2


def test_errors_of_a_member_end_the_prompt_of_its_group() -> None:
    config = SchedulerConfig(planner="fixed_sp", fixed_sp=2, breaker_errors=0)
    errors = (Errors(at_s=0.0, instance_id="p1", for_s=1.0),)
    run = Run(toy_spec(config, prefill=2, errors=errors), [planned(0, 0.0, 8000, 5)])
    assert run.records[0].error == "failed"


def test_chunks_of_a_slow_instance_take_longer() -> None:
    slowness = (Slowness(at_s=1.0, instance_id="p0", for_s=1.0, factor=4.0),)
    run = Run(toy_spec(slowness=slowness), [planned(i, 3.0 * i / 2, 2000) for i in range(3)])
    taken = [run.records[index].ttft_s for index in range(3)]
    assert taken == pytest.approx([prefill_s(2000), 4 * prefill_s(2000), prefill_s(2000)])


REQUESTS = 1000


def played_with_a_slow_one(
    slow_factor: float, rate_rps: float, seed: int, planner: str = "least_queue"
) -> Run:
    """Of four instances p1 takes ten times as long for a minute, from 5 s on."""
    slowness = (Slowness(at_s=5.0, instance_id="p1", for_s=60.0),)
    config = SchedulerConfig(slow_factor=slow_factor, planner=planner)
    spec = toy_spec(config, prefill=4, decode=2, slowness=slowness)
    return Run(spec, chats(REQUESTS, rate_rps, seed))


def in_time(run: Run) -> float:
    in_time = (one.ttft_s is not None and one.ttft_s <= 1.0 for one in run.records.values())
    return sum(in_time) / REQUESTS


@pytest.mark.parametrize("seed", seeds(1, 2))
@pytest.mark.parametrize(("planner", "late"), [("least_queue", 0.15), ("auto", 0.7)])
def test_a_slow_instance_gets_few_prompts_and_the_others_are_in_time(
    planner: str, late: float, seed: int
) -> None:
    """With SP groups more is late: which member delays a group is not known."""
    off, on = (played_with_a_slow_one(factor, 40.0, seed, planner) for factor in (0.0, 3.0))
    assert 1 - in_time(on) < late * (1 - in_time(off)), (in_time(on), in_time(off))
    assert on.simulation.machine.slow_instances.names() == {"p1"}  # the run ends before the minute
    assert not off.simulation.machine.slow_instances.names()


def test_a_slow_instance_that_has_caught_up_is_slow_no_more() -> None:
    run = played_with_a_slow_one(3.0, 10.0, 0)  # ends at 100 s
    assert not run.simulation.machine.slow_instances.names()


def test_no_instance_is_slow_where_most_lag() -> None:
    """Then the profile is wrong: nobody is kept from work."""
    slowness = tuple(Slowness(at_s=1.0, instance_id=f"p{i}", for_s=100.0) for i in range(3))
    run = Run(toy_spec(prefill=4, decode=2, slowness=slowness), chats(300, 5.0))
    assert not run.simulation.machine.slow_instances.names()
    assert not failed_of(run)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"errors": (Errors(at_s=0, instance_id="d0"),)}, "errors.instance_id is 'd0'"),
        ({"errors": (Errors(at_s=0, instance_id="p1"),)}, "of which there are 1"),
        ({"errors": (Errors(at_s=0, instance_id="p0", share=1.5),)}, "errors.share is 1.5"),
        ({"errors": (Errors(at_s=-1, instance_id="p0"),)}, "at_s -1"),
        ({"slowness": (Slowness(at_s=0, instance_id="p0", factor=0.5),)}, "slow.factor is 0.5"),
        ({"slowness": (Slowness(at_s=0, instance_id="p0", for_s=0),)}, "for_s 0"),
    ],
)
def test_faults_that_make_no_sense(fault, message) -> None:
    with pytest.raises(ConfigError, match=message):
        toy_spec(**fault)
