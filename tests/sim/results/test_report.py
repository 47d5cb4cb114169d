"""Figures of a simulation, against figures computed from all records at once."""

from __future__ import annotations

import json
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.errors import ConfigError
from millrace.sim.results.histogram import Histogram
from millrace.sim.results.report import CDF_SHARES, Collector, RequestRecord, write_json
from millrace.sim.results.timeline import Timeline


def record(index=0, name="a", **values):
    given = {"ttft_s": 0.2, "e2e_s": 1.0, "tbt_s": 0.05, "isolated_s": 0.1, "sp": 1, "chunks": 1}
    return RequestRecord(
        index=index,
        class_name=name,
        arrival_s=0.0,
        input_tokens=100,
        output_tokens=10,
        **(given | values),
    )


def collected(*records):
    collector = Collector()
    for one in records:
        collector.add(one)
    return collector


values = st.lists(st.floats(0.0, 1e6) | st.floats(0.0, 1e-6), min_size=1, max_size=60)


@given(values, st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5))
def test_quantiles_are_within_one_percent(numbers, shares):
    histogram = Histogram()
    for number in numbers:
        histogram.add(number)
    ordered = sorted(numbers)
    for share, found in zip(sorted(shares), histogram.quantiles(sorted(shares)), strict=True):
        # Nearest rank, by counting: the least value that at least this share do not exceed.
        exact = next(v for n, v in enumerate(ordered, 1) if n >= share * len(ordered) - 1e-6)
        assert found == pytest.approx(exact, rel=0.0101, abs=1.1e-9)


@given(values, values)
def test_merging_equals_adding(left, right):
    merged, both, other = Histogram(), Histogram(), Histogram()
    for number in left:
        merged.add(number)
        both.add(number)
    for number in right:
        other.add(number)
        both.add(number)
    merged.merge(other)
    found, wanted = merged.distribution(), both.distribution()
    assert (found.count, found.p50, found.p99, found.max) == (
        wanted.count,
        wanted.p50,
        wanted.p99,
        wanted.max,
    )
    assert found.mean == pytest.approx(wanted.mean)


def test_nothing_at_all():
    report = Collector().report(0.0)
    assert (report.requests, report.total.attainment, report.total.ttft_s.p99) == (0, 0.0, 0.0)
    assert report.classes == {}


def test_failures_are_misses_and_have_no_latency():
    collector = collected(
        record(ttft_slo_s=0.2, tbt_slo_s=0.05),  # exactly at both
        record(ttft_slo_s=0.19, tbt_slo_s=0.05),
        record(ttft_slo_s=0.2, tbt_slo_s=0.049),
        record(name="b", tbt_s=None, tbt_slo_s=0.01),  # a single token has no gap to miss by
        record(name="b", error="refused", ttft_s=0.0),
    )
    assert (collector.requests, collector.missed) == (5, 3)
    report = collector.report(10.0)
    total, a, b = report.total, report.classes["a"], report.classes["b"]
    assert (total.requests, total.succeeded) == (5, 4)
    assert (a.ttft_attainment, a.tbt_attainment, a.attainment) == pytest.approx(
        (2 / 3, 2 / 3, 1 / 3)
    )
    assert (b.ttft_attainment, b.tbt_attainment, b.attainment) == (0.5, 0.5, 0.5)
    assert (total.attainment, total.goodput_rps) == pytest.approx((0.4, 0.2))
    assert total.ttft_s.count == 4
    assert total.tbt_s.count == 3
    assert report.errors == {"refused": 1}
    assert report.request_rate_rps == pytest.approx(0.4)
    assert report.input_tokens_per_s == pytest.approx(40.0)


def test_the_end_counts_like_the_other_objectives():
    total = (
        collected(
            record(e2e_slo_s=1.0),  # exactly
            record(e2e_slo_s=0.99, tbt_slo_s=0.05),
            record(e2e_slo_s=1.0, ttft_slo_s=0.1),
        )
        .report(10.0)
        .total
    )
    assert (total.ttft_attainment, total.tbt_attainment) == pytest.approx((2 / 3, 1.0))
    assert (total.e2e_attainment, total.attainment) == pytest.approx((2 / 3, 1 / 3))
    assert total.attained == 1


def test_waits_are_measured_by_the_isolated_prefill():
    report = collected(
        record(queued_s=0.3, suspended_s=0.1, longest_suspension_s=0.06, ttft_s=0.5),
        record(queued_s=0.0, attempts=2, sp=8, chunks=3),
    ).report(1.0)
    assert report.total.wait_multiple.max == pytest.approx(4.0)
    assert report.total.slowdown.max == pytest.approx(5.0)
    assert report.total.longest_suspension_s.max == 0.06
    assert (report.retried, report.mean_chunks) == (1, 2.0)
    assert report.sp_degrees == {"1": 1, "8": 1}


def many(seed, count):
    rng = random.Random(seed)
    for index in range(count):
        yield record(
            index,
            rng.choice("abc"),
            ttft_s=rng.lognormvariate(0, 2),
            ttft_slo_s=1.0,
            queued_s=rng.random(),
        )


def test_totals_are_those_of_the_classes_together():
    records = list(many(1, 3000))
    report = collected(*records).report(60.0)
    total = report.total
    ttft = sorted(r.ttft_s for r in records)
    assert total.ttft_attainment == pytest.approx(sum(t <= 1.0 for t in ttft) / 3000)
    assert total.ttft_s.p99 == pytest.approx(ttft[2969], rel=0.01)
    assert total.ttft_s.mean == pytest.approx(sum(ttft) / 3000)
    assert sum(c.requests for c in report.classes.values()) == 3000
    assert len(total.ttft_quantiles_s) == len(CDF_SHARES)
    assert total.ttft_quantiles_s[50] == total.ttft_s.p50
    assert list(total.ttft_quantiles_s) == sorted(total.ttft_quantiles_s)


def test_memory_does_not_grow_with_requests():
    collector = collected(*many(1, 2000))
    before = len(pickle.dumps(collector))
    for one in many(2, 20_000):
        collector.add(one)
    assert len(pickle.dumps(collector)) <= 2 * before


def test_equal_records_give_equal_bytes(tmp_path):
    for name in ("one", "two"):
        write_json(tmp_path / name, collected(*many(5, 500)).report(3.3).to_json())
    one = (tmp_path / "one").read_bytes()
    assert one == (tmp_path / "two").read_bytes()
    document = json.loads(one)
    assert list(document)[:3] == ["duration_s", "requests", "succeeded"]
    assert list(document["classes"]) == ["a", "b", "c"]
    assert f'"duration_s": {3.3!r}' in one.decode()


def test_a_sink_sees_every_record():
    seen = []
    collector = Collector(seen.append)
    for one in many(1, 5):
        collector.add(one)
    assert [r.index for r in seen] == [0, 1, 2, 3, 4]


def test_a_bad_path_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--json"):
        write_json(tmp_path / "no" / "where", {})


def test_a_timeline_keeps_a_window_and_a_number_of_blocks():
    timeline = Timeline(start_s=1.0, end_s=3.0, most=2)
    timeline.block("p0", 0.0, 1.0, 1, "prefill")  # before the window
    timeline.block("p0", 0.5, 1.5, 2, "prefill")
    timeline.block("p1", 2.5, 9.0, 3, "blocked")
    timeline.block("p1", 2.0, 2.1, 4, "prefill")
    found = [(b.instance_id, b.start_s, b.end_s, b.request_index) for b in timeline.blocks]
    assert found == [("p0", 1.0, 1.5, 2), ("p1", 2.5, 3.0, 3)]
    assert timeline.left_out == 1
