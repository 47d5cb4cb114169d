"""Decode instances in whole simulations: joins, full batches, KV parallelism."""

from __future__ import annotations

import pytest

from millrace.core.config import SchedulerConfig
from millrace.sim.cluster.spec import Failure, SimSpec
from millrace.sim.workload.workload import PlannedRequest
from support.simulation import (
    DECODE_ATTN_S,
    LAYERS,
    Run,
    decode_step_s,
    planned,
    prefill_s,
    toy_spec,
)


def test_one_request_alone_takes_its_prefill_its_transfer_and_its_steps():
    run = Run(toy_spec(), [planned(0, 1.0, 1000, 101)])
    record = run.records[0]
    assert record.ttft_s == pytest.approx(prefill_s(1000))
    # KV: the last layer's 1000 x 1000 bytes at 1e9 bytes/s; 100 steps over contexts 1001..1100.
    steps_s = sum(decode_step_s(1, 1001 + i) for i in range(100))
    assert record.e2e_s == pytest.approx(prefill_s(1000) + 1e-3 + steps_s, rel=1e-4)
    assert record.tbt_s == pytest.approx((1e-3 + steps_s) / 100, rel=1e-4)
    assert (record.queued_s, record.suspended_s, record.chunks, record.sp) == (0.0, 0.0, 1, 1)


def test_a_single_token_is_prefill_alone():
    record = Run(toy_spec(), [planned(0, 0.0, 1000, 1)]).records[0]
    assert record.e2e_s == record.ttft_s == pytest.approx(prefill_s(1000))
    assert record.tbt_s is None


def test_who_lands_at_a_full_batch_waits_for_a_place():
    requests = [planned(i, 0.0, 10, 1001) for i in range(3)]
    free = Run(toy_spec(prefill=4, max_batch=8), requests)
    full = Run(toy_spec(prefill=4, max_batch=2), requests)
    assert free.counters.decode_wait_s == 0.0
    first_end_s = min(record.e2e_s for record in full.records.values())
    assert full.counters.decode_wait_s == pytest.approx(first_end_s, rel=0.02)
    assert max(r.e2e_s for r in full.records.values()) > 1.9 * first_end_s


def limited(most: int, **fields) -> SimSpec:
    config = SchedulerConfig(
        max_kv_tokens_per_worker=most, max_queue_requests=10**6, max_queue_s=1e9
    )
    return toy_spec(config, **fields)


def test_kv_workers_share_a_long_context():
    requests = [planned(0, 0.0, 40_000, 101)]
    alone = Run(toy_spec(), requests)
    spread = Run(limited(10_500, kvp=3), requests)
    assert spread.counters.kvp_onboardings == 3
    # Of 40000 tokens per layer the KV owner reads 656 pages; four workers exchange 3 messages.
    read_s = LAYERS * DECODE_ATTN_S * (40_050 - 656 * 16)
    assert alone.records[0].tbt_s - spread.records[0].tbt_s == pytest.approx(
        read_s - LAYERS * 3e-5, rel=0.01
    )


def test_what_no_workers_can_hold_is_refused():
    requests = [planned(0, 0.0, 40_000, 101), planned(1, 0.0, 9000, 101)]
    run = Run(limited(10_000, decode_kv_tokens=16_000), requests)
    assert run.records[0].error == "too_large"
    assert (run.records[1].error, run.counters.kvp_onboardings) == ("", 0)


def test_what_fits_no_instance_is_spread_without_a_limit():
    run = Run(toy_spec(decode_kv_tokens=16_000, kvp_kv_tokens=32_000, kvp=1), two_of(40_000))
    assert run.counters.kvp_onboardings == 2
    assert run.counters.refused == 0


def two_of(tokens: int, new: int = 101) -> list[PlannedRequest]:
    return [planned(i, 0.0, tokens, new) for i in range(2)]


def test_a_second_long_context_waits_for_all_of_its_memory():
    """As the live scheduler places it: whole or not at all, though the KV owner has room for a
    part.
    """
    room = {"decode_kv_tokens": 64_000, "kvp_kv_tokens": 16_000, "kvp": 3}
    run = Run(limited(16_000, **room), two_of(60_000))
    first, second = (run.records[i] for i in range(2))
    assert run.counters.kvp_onboardings == 6
    assert second.queued_s >= first.e2e_s
    roomy = Run(limited(16_000, **{**room, "kvp_kv_tokens": 32_000}), two_of(60_000))
    assert roomy.records[1].queued_s < first.e2e_s


def test_no_more_workers_take_part_than_the_scheduler_allows():
    config = SchedulerConfig(max_kvp_degree=2, max_kv_tokens_per_worker=10_000)
    spec = toy_spec(config, kvp=3, decode_kv_tokens=12_000, kvp_kv_tokens=12_000)
    run = Run(spec, [planned(0, 0.0, 15_000, 11), planned(1, 0.0, 25_000, 11)])
    assert run.counters.kvp_onboardings == 1
    assert [run.records[i].error for i in range(2)] == ["", "too_large"]


@pytest.mark.parametrize(("at_s", "error"), [(0.1, ""), (8.0, "failed")])
def test_a_holder_that_dies_takes_the_request_along_unless_it_can_begin_anew(at_s, error):
    request = [planned(0, 0.0, 40_000, 2001)]
    failure = Failure(at_s=at_s, instance_id="k0", down_s=1.0)
    run = Run(limited(25_000, kvp=1, failures=(failure,)), request)
    record = run.records[0]
    assert prefill_s(40_000) < 8.0 < prefill_s(40_000) + 2000 * decode_step_s(1, 25_000)
    assert record.error == error
    if not error:
        assert record.attempts == 2
        assert 1.1 <= record.ttft_s - prefill_s(40_000) < 2.0  # once the worker was back
