"""Mixed instances against iterations counted by hand: Medha section 3.3, Mnemosyne section 4."""

from __future__ import annotations

import math

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.cost.operators import BatchShape
from millrace.core.instance.packing import PackingConfig
from millrace.sim.cluster.sharded_passes import spread_pass_s
from millrace.sim.cluster.spec import Failure, SimSpec
from millrace.sim.workload.workload import SloClass
from support.simulation import (
    LAYERS,
    OVERHEAD_S,
    Run,
    decode_step_s,
    planned,
    toy_operators,
    toy_spec,
)

FIXED = PackingConfig(t_target_s=1.0, adaptive=False, fixed_chunk_tokens=1000)
OPERATORS = toy_operators()
FREE = SloClass(name="free")


def mixed(packing: PackingConfig = FIXED, policy: str = "fcfs", most: int = 0, **fields) -> SimSpec:
    config = SchedulerConfig(
        policy=policy, max_queue_requests=10**6, max_queue_s=1e9, max_kv_tokens_per_worker=most
    )
    return toy_spec(config, **{"prefill": 0, "decode": 0, "mixed": 1, "packing": packing, **fields})


def pass_s(*prefills: tuple[int, int], decodes: int = 0, context: int = 0, kvp: int = 1) -> float:
    shape = BatchShape(prefills=prefills, decodes=decodes, decode_context_tokens=context)
    return OPERATORS.pass_s(shape, kvp)


def test_one_prompt_alone_is_its_chunks_one_after_the_other():
    record = Run(mixed(), [planned(0, 0.0, 2500, 1)]).records[0]
    expected_s = pass_s((1000, 0)) + pass_s((1000, 1000)) + pass_s((500, 2000))
    assert record.ttft_s == pytest.approx(expected_s)
    assert record.chunks == 3
    assert record.suspended_s == 0.0


def test_decodes_ride_along_and_go_on_alone():
    run = Run(mixed(), [planned(0, 0.0, 500, 51), planned(1, 0.0, 3000, 1)])
    # The first had an iteration to itself; the second's 3000 share theirs with its decodes.
    first_s = pass_s((500, 0))
    assert run.records[0].ttft_s == pytest.approx(first_s)
    left_s = (
        pass_s((999, 0), decodes=1, context=501)
        + pass_s((999, 999), decodes=1, context=502)
        + pass_s((999, 1998), decodes=1, context=503)
        + pass_s((3, 2997), decodes=1, context=504)
    )
    assert run.records[1].ttft_s == pytest.approx(first_s + left_s)
    steps_s = sum(decode_step_s(1, 505 + i) for i in range(46))
    assert run.records[0].e2e_s == pytest.approx(first_s + left_s + steps_s, rel=1e-3)


def test_prefill_that_comes_while_decodes_are_alone_waits_for_their_step():
    run = Run(mixed(), [planned(0, 0.0, 10, 1001), planned(1, 0.5, 500, 1)])
    end_s, context = pass_s((10, 0)), 11
    while end_s < 0.5:
        end_s += decode_step_s(1, context)
        context += 1
    wait_s = run.records[1].queued_s
    assert wait_s == pytest.approx(end_s - 0.5, abs=1e-5)
    assert wait_s > 1e-4
    assert run.records[1].ttft_s == pytest.approx(
        wait_s + pass_s((500, 0), decodes=1, context=context), rel=1e-4
    )


ADAPTIVE = PackingConfig(t_target_s=1.0)


def beside_a_long_prompt(answer: SloClass, **fields) -> Run:
    """An answer with these objectives, during all of which a long prompt is computed."""
    return Run(
        mixed(ADAPTIVE, **fields), [planned(0, 0.0, 10, 21, answer), planned(1, 0.0, 60_000)]
    )


@pytest.mark.parametrize(
    "answer", [SloClass(name="tbt", tbt_s=0.05), SloClass(name="e2e", e2e_s=1.0)]
)
@pytest.mark.parametrize(("spp", "most_s"), [(1, 0.0501), (2, 0.06)])
def test_iterations_keep_the_pace_that_running_answers_ask_for(answer, spp, most_s):
    """With two stages the prompt's first chunk begins before the answer has a token."""
    free = beside_a_long_prompt(FREE, spp=spp).records
    held = beside_a_long_prompt(answer, spp=spp).records
    assert free[0].tbt_s > 0.1
    assert 0.02 < held[0].tbt_s <= most_s  # the prompt gets the rest
    assert held[1].ttft_s > free[1].ttft_s


def test_a_pace_that_an_answer_could_not_keep_alone_holds_up_no_prompt():
    free = beside_a_long_prompt(FREE).records
    held = beside_a_long_prompt(SloClass(name="tbt", tbt_s=1e-6)).records
    assert held[1].ttft_s == free[1].ttft_s


def test_stages_overlap_the_chunks_of_one_prompt():
    spp = 4
    record = Run(mixed(spp=spp), [planned(0, 0.0, 3000, 1)]).records[0]
    stages_s = [OVERHEAD_S + (pass_s((1000, done)) - OVERHEAD_S) / spp for done in (0, 1000, 2000)]
    # Dense schedule: stage 1 is busy throughout, and the last chunk has three more stages to go.
    assert record.ttft_s == pytest.approx(sum(stages_s) + 3 * stages_s[-1])


def test_a_decode_takes_part_in_one_of_so_many_iterations_as_there_are_stages():
    packing = PackingConfig(t_target_s=1.0, adaptive=False, fixed_chunk_tokens=100)
    run = Run(mixed(packing, spp=2), [planned(0, 0.0, 10, 11), planned(1, 0.0, 3000, 1)])
    # Its ten steps are twenty iterations of the other prompt, each of two stages of half a pass
    # (and a launch each): a token takes as long as one whole pass.
    first_s = pass_s((99, 99), decodes=1, context=11) + OVERHEAD_S
    last_s = pass_s((99, 99 * 22), decodes=1, context=20) + OVERHEAD_S
    assert first_s < run.records[0].tbt_s < last_s
    plain = Run(mixed(packing), [planned(0, 0.0, 10, 11), planned(1, 0.0, 3000, 1)])
    assert run.records[1].ttft_s < 0.7 * plain.records[1].ttft_s


def test_kv_workers_keep_iterations_flat():
    prompt = [planned(0, 0.0, 40_000, 1)]
    alone = Run(mixed(), prompt)
    spread = Run(mixed(kvp=4, most=10_000), prompt)
    assert spread.counters.kvp_onboardings == 3  # the answer has the fifth, unused
    assert spread.counters.longest_step_s < 0.5 * alone.counters.longest_step_s
    expected_s = 0.0
    for done in range(0, 40_000, 1000):
        # Shards fill up one after another: from the second shard on the KV owner's is the longest.
        degree = math.ceil((done + 1000) / 10_000)
        expected_s += pass_s((1000, min(done, 10_000) * degree), kvp=degree)
    assert spread.records[0].ttft_s == pytest.approx(expected_s, rel=1e-3)


def test_adaptive_chunks_keep_to_the_target_over_shards_that_fill_up():
    packing = PackingConfig(t_target_s=0.02, long_kv_tokens=10**6)
    spread = Run(mixed(packing, kvp=3, most=20_000), [planned(0, 0.0, 60_000, 1)])
    assert 0.015 < spread.counters.longest_step_s <= 0.02
    assert spread.counters.kvp_onboardings == 2


def test_a_long_prompt_waits_for_the_workers_of_another():
    prompts = [planned(i, 0.0, 30_000, 101) for i in range(2)]
    room = {"kvp": 1, "decode_kv_tokens": 40_000, "kvp_kv_tokens": 16_000, "most": 20_000}
    run = Run(mixed(**room), prompts)
    assert run.records[1].queued_s >= run.records[0].e2e_s


def test_each_prompt_of_a_pass_reads_its_own_share_of_its_history():
    shape = BatchShape(prefills=((100, 8000), (100, 40_000)))
    found_s = spread_pass_s(OPERATORS, shape, [1, 4])
    # Shares of 8000 and of 10000; with four workers there are three messages a layer and prompt.
    shares_s = pass_s((100, 8000), (100, 10_000))
    assert found_s == pytest.approx(shares_s + LAYERS * 2 * 3e-5)


def test_adaptive_chunks_keep_to_the_target():
    packing = PackingConfig(t_target_s=0.02, long_kv_tokens=10**6)
    run = Run(mixed(packing), [planned(0, 0.0, 20, 2001, FREE), planned(1, 0.1, 20_000, 1)])
    assert run.counters.longest_step_s <= 0.02
    assert run.records[0].tbt_s <= 0.02


def test_least_relative_slack_goes_before_the_first_come():
    long, short = SloClass(name="long", ttft_s=60.0), SloClass(name="short", ttft_s=0.3)
    requests = [planned(0, 0.0, 40_000, 1, long), planned(1, 0.1, 1000, 1, short)]
    config = PackingConfig(t_target_s=1.0, adaptive=False, fixed_chunk_tokens=1000)
    fcfs, lars = (Run(mixed(config, policy), requests) for policy in ("fcfs", "lars"))
    assert lars.records[1].ttft_s < 0.2 < 1.0 < fcfs.records[1].ttft_s
    assert lars.records[0].suspended_s > 0.0


def test_an_instance_dies_and_its_requests_go_elsewhere():
    requests = [planned(i, 0.0, 4000, 1) for i in range(6)]
    failure = Failure(at_s=0.05, instance_id="m0", down_s=5.0)
    run = Run(mixed(mixed=2, failures=(failure,)), requests)
    assert all(record.error == "" for record in run.records.values())
    assert sorted(record.attempts for record in run.records.values()) == [1, 1, 1, 2, 2, 2]
