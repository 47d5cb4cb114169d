"""Decode instances in whole simulations: joins, full batches, KV parallelism."""

from __future__ import annotations

import pytest

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


def test_kv_workers_share_a_long_context():
    requests = [planned(0, 0.0, 40_000, 101)]
    alone = Run(toy_spec(), requests)
    spread = Run(toy_spec(kvp=3, max_kv_tokens_per_worker=10_500), requests)
    assert spread.counters.kvp_onboardings == 3
    # The read of 40000 tokens a layer is cut to a quarter; four workers exchange 3 messages.
    read_s = LAYERS * DECODE_ATTN_S * 40_050
    assert alone.records[0].tbt_s - spread.records[0].tbt_s == pytest.approx(
        0.75 * read_s - LAYERS * 3e-5, rel=0.01
    )


def test_without_workers_to_spare_a_context_stays_whole():
    requests = [planned(0, 0.0, 40_000, 101)]
    assert Run(toy_spec(max_kv_tokens_per_worker=10_000), requests).counters.kvp_onboardings == 0
