"""Whole simulations: queues by hand, determinism, conservation, failures, refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.errors import ConfigError
from millrace.core.instance.packing import PackingConfig
from millrace.sim.cluster.spec import Failure, SimSpec
from millrace.sim.loop import Simulation
from millrace.sim.results.report import Collector
from millrace.sim.results.timeline import Timeline
from millrace.sim.workload.workload import PlannedRequest, SloClass
from support.simulation import Run, planned, prefill_s, toy_profile, toy_spec


def config(**fields) -> SchedulerConfig:
    return SchedulerConfig(**{"max_queue_requests": 10**6, "max_queue_s": 1e9, **fields})


def poisson(
    count: int, rate: float, mean: int = 2000, new: int = 20, seed: int = 0
) -> Iterator[PlannedRequest]:
    rng, now_s = random.Random(seed), 0.0
    classes = SloClass(name="tight", ttft_s=0.5), SloClass(name="loose", ttft_s=5.0, tbt_s=0.1)
    for index in range(count):
        now_s += rng.expovariate(rate)
        tokens = 1 + int(rng.expovariate(1 / mean))
        yield planned(index, now_s, tokens, 1 + int(rng.expovariate(1 / new)), classes[index % 2])


def test_first_come_first_served_on_one_instance_is_lindleys_recursion():
    requests = list(poisson(300, 8.0, new=0.5))
    alone = config(policy="fcfs", preemption="none", batch_tokens=0)
    run = Run(toy_spec(alone), requests)
    free_s = 0.0
    for request in requests:
        start_s = max(free_s, request.arrival_s)
        free_s = start_s + prefill_s(request.input_tokens)
        record = run.records[request.index]
        assert record.queued_s == pytest.approx(start_s - request.arrival_s, abs=1e-9)
        assert record.ttft_s == pytest.approx(free_s - request.arrival_s)


def test_commands_and_reports_take_their_time():
    record = Run(toy_spec(control_s=0.01), [planned(0, 0.0, 1000, 1)]).records[0]
    assert record.queued_s == pytest.approx(0.01)
    assert record.ttft_s == pytest.approx(0.01 + prefill_s(1000))


def test_what_is_queued_ahead_needs_no_command():
    requests = [planned(i, 0.0, 1000, 1) for i in range(2)]
    run = Run(toy_spec(config(tasks_ahead=2), control_s=0.01), requests)
    assert run.records[1].ttft_s == pytest.approx(0.01 + 2 * prefill_s(1000))
    late = Run(toy_spec(config(tasks_ahead=1), control_s=0.01), requests)
    assert late.records[1].ttft_s == pytest.approx(0.03 + 2 * prefill_s(1000))


SPECS = {
    "fcfs": toy_spec(prefill=3, decode=2),
    "preempting": toy_spec(
        config(policy="s_edf", preemption="operator", batch_tokens=2048),
        prefill=3,
        decode=2,
        control_s=5e-4,
        noise=0.1,
    ),
    "chunked": toy_spec(
        config(policy="edf", preemption="chunk"), prefill=3, decode=2, max_chunk_tokens=512
    ),
    "groups": toy_spec(config(planner="fixed_sp", fixed_sp=2), prefill=4, decode=2, backends=1),
    "preempting groups": toy_spec(
        config(planner="fixed_sp", fixed_sp=2, policy="s_edf", preemption="layer"),
        prefill=4,
        decode=2,
        control_s=5e-4,
    ),
    "failing": toy_spec(
        config(policy="s_edf", preemption="operator"),
        prefill=3,
        decode=3,
        control_s=5e-4,
        failures=(
            Failure(at_s=1.0, instance_id="p0", down_s=2.0),
            Failure(at_s=2.0, instance_id="d1", down_s=1.0),
            Failure(at_s=2.1, instance_id="p0", down_s=1.0),
            Failure(at_s=4.0, instance_id="p0", down_s=1.0),
        ),
    ),
    "mixed": toy_spec(
        config(policy="lars", max_kv_tokens_per_worker=3000),
        prefill=0,
        decode=0,
        mixed=3,
        spp=2,
        kvp=4,
        packing=PackingConfig(t_target_s=0.03),
        failures=(
            Failure(at_s=3.0, instance_id="m1", down_s=2.0),
            Failure(at_s=4.0, instance_id="k2", down_s=2.0),
        ),
    ),
    "spread": toy_spec(
        config(policy="s_edf", preemption="operator", max_kv_tokens_per_worker=1500),
        prefill=3,
        decode=2,
        decode_kv_tokens=20_000,
        kvp=5,
        kvp_kv_tokens=8000,
        control_s=5e-4,
        failures=(
            Failure(at_s=1.0, instance_id="k0", down_s=2.0),
            Failure(at_s=2.0, instance_id="d1", down_s=1.0),
            Failure(at_s=2.1, instance_id="p0", down_s=1.0),
        ),
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_every_request_ends_once_and_nothing_is_left(name):
    run = Run(SPECS[name], poisson(300, 20.0))
    assert sorted(run.records) == list(range(300))
    counters = run.counters
    assert counters.requests == counters.finished + counters.failed == 300
    assert not run.simulation.machine.requests
    for record in run.records.values():
        assert record.error or record.ttft_s <= record.e2e_s
    assert all(0.0 <= share <= 1.0 + 1e-9 for share in counters.busy_share.values())


@pytest.mark.parametrize("name", SPECS)
def test_the_same_seed_gives_the_same_run(name):
    first, second = (Run(SPECS[name], poisson(200, 20.0)) for _ in range(2))
    assert first.records == second.records
    assert asdict(first.counters) == asdict(second.counters)


def test_another_seed_gives_other_noise():
    first = Run(SPECS["preempting"], poisson(100, 20.0))
    second = Run(replace(SPECS["preempting"], seed=1), poisson(100, 20.0))
    assert first.records != second.records


@settings(max_examples=12)
@given(
    preemption=st.sampled_from(["none", "chunk", "layer", "operator"]),
    policy=st.sampled_from(["fcfs", "edf", "s_edf", "lrs"]),
    sp=st.sampled_from([1, 2, 4]),
    batch_tokens=st.sampled_from([0, 1024]),
    control_s=st.sampled_from([0.0, 0.002]),
    rate=st.sampled_from([5.0, 40.0]),
    seed=st.integers(0, 1000),
    failures=st.lists(
        st.tuples(
            st.sampled_from(["p0", "p1", "p2", "d0"]), st.floats(0.01, 3), st.floats(0.01, 3)
        ),
        max_size=3,
    ),
)
def test_no_mix_of_settings_loses_a_request(
    preemption, policy, sp, batch_tokens, control_s, rate, seed, failures
):
    planner = {"planner": "fixed_sp", "fixed_sp": sp} if sp > 1 else {}
    spec = toy_spec(
        config(policy=policy, preemption=preemption, batch_tokens=batch_tokens, **planner),
        prefill=4,
        decode=2,
        backends=2,
        max_batch=8,
        max_chunk_tokens=700,
        control_s=control_s,
        noise=0.2,
        seed=seed,
        failures=tuple(
            Failure(at_s=at_s, instance_id=name, down_s=down_s) for name, at_s, down_s in failures
        ),
    )
    run = Run(spec, poisson(60, rate, seed=seed))
    assert sorted(run.records) == list(range(60))
    if not failures:
        assert not any(record.error for record in run.records.values())


def test_a_preempted_prompt_resumes_and_its_waits_are_told():
    tight, loose = SloClass(name="tight", ttft_s=0.2), SloClass(name="loose", ttft_s=60.0)
    requests = [planned(0, 0.0, 20_000, 1, loose), planned(1, 0.5, 1000, 1, tight)]
    run = Run(toy_spec(config(policy="edf", preemption="operator")), requests)
    long, short = run.records[0], run.records[1]
    assert short.ttft_s < 0.1
    assert long.suspended_s == pytest.approx(prefill_s(1000))
    assert long.longest_suspension_s == long.suspended_s
    assert long.ttft_s == pytest.approx(prefill_s(20_000) + prefill_s(1000))
    assert run.counters.preemptions == 1
    assert run.counters.blocking_s.count == 1


def test_a_round_follows_arrivals_and_completions_only():
    """FlowPrefill Alg. 2."""
    run = Run(SPECS["preempting"], poisson(300, 20.0))
    assert run.counters.rounds <= 2 * 300


@pytest.mark.parametrize("fails", [False, True])
def test_what_fits_no_decode_instance_is_spread_and_its_pages_come_back(fails):
    """The second could not be placed while a KVP worker kept pages of the first."""
    failures = (Failure(instance_id="d0", at_s=2.02, down_s=0.1),) if fails else ()
    spec = toy_spec(decode=2, decode_kv_tokens=1024, failures=failures)
    run = Run(spec, [planned(i, 2.0 * i, 1500, 20) for i in range(2)])
    assert [record.error for record in run.records.values()] == ["", ""]
    assert run.records[1].ttft_s < 5.0


def test_what_fits_nowhere_is_refused_and_counted_as_failed():
    run = Run(toy_spec(decode_kv_tokens=1600), [planned(0, 0.0, 5000), planned(1, 0.0, 500)])
    assert run.records[0].error == "too_large"
    assert run.records[1].error == ""
    assert (run.counters.refused, run.counters.failed, run.counters.finished) == (1, 1, 1)


def test_a_full_queue_refuses():
    spec = toy_spec(SchedulerConfig(max_queue_requests=2, tasks_ahead=1))
    run = Run(spec, [planned(i, 0.0, 5000) for i in range(6)])
    assert [record.error for record in run.records.values()].count("overloaded") == 3


def test_a_request_past_its_time_fails_and_frees_what_it_held():
    spec = toy_spec(config(request_timeout_s=1.0, heartbeat_s=0.1, lease_s=1.0))
    run = Run(spec, [planned(0, 0.0, 50_000), planned(1, 0.0, 100)])
    assert run.records[0].error == "failed"
    assert run.counters.duration_s < 15.0


def test_stop_ends_a_run_early():
    seen = []
    run = Run(
        SPECS["fcfs"],
        poisson(300, 20.0),
        stop=lambda collector: collector.requests >= 50,
        progress=lambda ended, now_s: seen.append((ended, now_s)),
    )
    assert len(run.records) == 50
    assert Run(SPECS["fcfs"], poisson(300, 20.0), progress=lambda *at: seen.append(at)).records
    assert [ended for ended, _ in seen] == [100, 200, 300]


def test_nothing_of_a_request_is_kept_after_its_end():
    live = []

    def requests() -> Iterator[PlannedRequest]:
        for request in poisson(600, 20.0):
            live.append(len(simulation.world.jobs) + len(simulation.machine.requests))
            yield request

    simulation = Simulation(SPECS["preempting"], requests(), Collector())
    simulation.run()
    assert max(live[300:]) <= 2 * max(live[:300]) + 20
    assert simulation.clock.next_s is None


def test_blocks_of_one_instance_never_overlap():
    timeline = Timeline()
    Run(SPECS["preempting groups"], poisson(80, 20.0), timeline=timeline)
    for instance_id in ("p0", "p1", "p2", "p3"):
        blocks = sorted(
            (block.start_s, block.end_s)
            for block in timeline.blocks
            if block.instance_id == instance_id
        )
        assert blocks
        for (_, end_s), (start_s, _) in pairwise(blocks):
            assert end_s <= start_s + 1e-9
    assert {block.kind for block in timeline.blocks} >= {"prefill", "decode", "blocked"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decode": 0}, "prefill and decode"),
        ({"mixed": 1}, "packing"),
        ({"backends": 0}, "sim.backends is 0; it must be at least 1"),
        ({"control_s": -1.0}, "control_s"),
        ({"transfer_backend": "pigeon"}, "nvlink, rdma"),
        ({"failures": (Failure(at_s=1.0, instance_id="p9"),)}, "p9"),
        ({"failures": (Failure(at_s=1.0, instance_id="p0", down_s=0.0),)}, "down_s"),
    ],
)
def test_a_specification_says_what_is_wrong_with_it(fields, message):
    with pytest.raises(ConfigError, match=message):
        SimSpec(profile=toy_profile(), **{"prefill": 1, "decode": 1, **fields})
