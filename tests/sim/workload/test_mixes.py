"""Synthetic workloads against the figures that the papers publish."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from millrace.core.cost.prefill_times import PrefillTimes
from millrace.core.errors import ConfigError
from millrace.core.instance.packing import PackingConfig
from millrace.profiles import load_profile
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.objectives import isolated_prefill, with_objectives
from millrace.sim.workload.lengths import (
    by_quantiles,
    log_uniform,
    lognormal_by_quantiles,
    mixture,
    truncated_lognormal,
)
from millrace.sim.workload.mixes import MIXES, MixOptions, build_mix
from millrace.sim.workload.traces import TraceRow
from millrace.sim.workload.workload import PlannedRequest, SloClass, WorkloadOptions, plan

COUNT = 30_000


def drawn(name, count=COUNT, **options):
    draw = build_mix(name, MixOptions(**options)).row_draw()
    rng = random.Random(7)
    return [draw(rng) for _ in range(count)]


def quantile(values, share):
    return sorted(values)[int(share * len(values))]


# FlowPrefill, Table 1: mean, P99, deviation and share in percent.
TABLE_1 = {
    "text": (590, 3040, 652, 68),
    "image": (532, 2764, 510, 8),
    "search": (5976, 16635, 3456, 20),
    "file": (6833, 22390, 5186, 4),
}


def test_qwen_has_table_1s_moments():
    rows = drawn("qwen", 60_000)
    for name, (mean, p99, std, percent) in TABLE_1.items():
        lengths = [row.input_tokens for row in rows if row.class_name == name]
        assert len(lengths) / 600 == pytest.approx(percent, rel=0.08)
        assert statistics.mean(lengths) == pytest.approx(mean, rel=0.05)
        assert statistics.stdev(lengths) == pytest.approx(std, rel=0.1)
        assert quantile(lengths, 0.99) == pytest.approx(p99, rel=0.15)


def test_qwen_has_table_2s_objectives():
    def objectives(name, model):
        return {c.name: (c.ttft_s, c.tbt_s) for c in mix(name, model).slo_classes}

    def mix(name, model):
        return build_mix(name, MixOptions(model=model))

    assert objectives("qwen", "llama3-8b") == {
        "text": (0.25, None),
        "image": (0.5, None),
        "search": (4.0, None),
        "file": (6.0, None),
    }
    assert objectives("qwen", "llama3-70b")["search"] == (15.0, None)
    assert objectives("qwen-colocated", "llama3-8b")["file"] == (18.0, 0.2)
    with pytest.raises(ConfigError, match="opt-13b"):
        mix("qwen", "opt-13b")


@pytest.mark.parametrize(
    ("name", "low", "high", "mean"),
    [("short", 4, 95, 23.6), ("medium", 8, 142, 32.8), ("long", 16, 190, 50.1)],
)
def test_tetris_ranges_and_means(name, low, high, mean):
    lengths = [row.input_tokens for row in drawn(f"tetris-{name}")]
    assert statistics.mean(lengths) == pytest.approx(mean * 1024, rel=0.02)
    # Assumed, not published: the range is six deviations of the logarithm wide.
    spread = statistics.stdev(math.log(length) for length in lengths)
    assert spread == pytest.approx(math.log(high / low) / 6, rel=0.05)
    assert low * 1024 <= min(lengths) < 1.5 * low * 1024
    assert 0.7 * high * 1024 < max(lengths) <= high * 1024


def test_medha_mix_is_sharegpt_with_long_requests():
    rows = drawn("medha-mix", 60_000)
    short = [row for row in rows if row.class_name == "short"]
    long = [row.input_tokens for row in rows if row.class_name == "long"]
    assert len(long) / len(rows) == pytest.approx(0.05, rel=0.05)
    assert statistics.mean(row.input_tokens for row in short) == pytest.approx(2340, rel=0.03)
    assert statistics.median(row.output_tokens for row in short) == pytest.approx(415, rel=0.03)
    assert 128_000 <= min(long) <= max(long) <= 1_000_000
    # MEDHA-SWE's P50 and P90 (section 6.1).
    assert statistics.median(long) == pytest.approx(393_000, rel=0.1)
    assert quantile(long, 0.9) == pytest.approx(839_000, rel=0.05)


def test_medha_mix_options():
    rows = [TraceRow(arrival_s=None, input_tokens=n, output_tokens=9) for n in (5, 6, 7)]
    found = drawn("medha-mix", 500, long_fraction=0.0, short_rows=rows)
    assert {(row.class_name, row.output_tokens) for row in found} == {("short", 9)}
    assert {row.input_tokens for row in found} == {5, 6, 7}
    assert {row.class_name for row in drawn("medha-mix", 50, long_fraction=1.0)} == {"long"}
    for fraction in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="--long-fraction"):
            MixOptions(long_fraction=fraction)


def test_mixed_reaches_from_a_hundred_tokens_to_a_million():
    lengths = [row.input_tokens for row in drawn("mixed")]
    assert 100 <= min(lengths) < 110
    assert 900_000 < max(lengths) <= 1_000_000


def gaps(name, count):
    """The gaps of a mix in units of the mean gap, and its requests."""
    mix = build_mix(name, MixOptions())
    options = WorkloadOptions(
        draw_row=mix.row_draw(), classes=mix.slo_classes, gaps=mix.gaps, rate_rps=4.0, seed=3
    )
    found = list(itertools.islice(plan(options), count))
    return [(b.arrival_s - a.arrival_s) * 4 for a, b in itertools.pairwise(found)], found


@pytest.mark.parametrize("name", ["bursts", "diurnal"])
def test_gaps_of_a_mix_keep_the_mean_rate(name):
    found, _ = gaps(name, 60_000)
    assert statistics.mean(found) == pytest.approx(1.0, rel=0.03)


def test_a_third_of_bursts_comes_at_three_times_the_rate():
    # A Poisson process puts 1 to 2 % of its windows of 50 requests below 0.72 mean gaps.
    found, _ = gaps("bursts", 60_000)
    windows = [statistics.mean(found[at : at + 50]) for at in range(0, len(found), 50)]
    assert sum(mean < 0.72 for mean in windows) / len(windows) == pytest.approx(0.33, abs=0.08)
    assert quantile(windows, 0.1) == pytest.approx(1 / 3, rel=0.15)


def test_a_day_has_its_chats_at_noon_and_its_documents_at_midnight():
    found, requests = gaps("diurnal", 50_000)

    def at_quarter(quarter):  # 250 requests around the top or bottom; the sine is 0.9 there
        first = 1000 * quarter // 4 - 125
        spans = [range(day + first, day + first + 250) for day in range(0, 49_000, 1000)]
        indices = [index for span in spans for index in span]
        kinds = [requests[index].slo.name for index in indices]
        rate = 1 / statistics.mean(found[index] for index in indices)
        return rate, kinds.count("document") / len(kinds)

    noon, midnight = at_quarter(1), at_quarter(3)
    assert noon[0] / midnight[0] == pytest.approx(1.54 / 0.46, rel=0.1)
    assert midnight[1] / noon[1] == pytest.approx(7.8 / 4.2, rel=0.2)


def test_a_heavy_tail_has_one_percent_of_a_million_tokens():
    rows = drawn("heavy-tail")
    lengths = [row.input_tokens for row in rows if row.class_name == "prompt"]
    assert statistics.median(lengths) == pytest.approx(1_000, rel=0.05)
    assert quantile(lengths, 0.9) == pytest.approx(8_000, rel=0.05)
    assert max(lengths) == 128_000
    million = [row.input_tokens for row in rows if row.class_name == "million"]
    assert set(million) == {1_000_000}
    assert len(million) / COUNT == pytest.approx(0.01, rel=0.15)


def test_agents_open_with_a_document_and_go_on_with_short_turns():
    rows = drawn("agents")
    assert rows[0].class_name == "document"
    turns = [row.input_tokens for row in rows if row.class_name == "turn"]
    documents = [row.input_tokens for row in rows if row.class_name == "document"]
    # 1/16 open a session; of the others, 1/25 prefill a whole session again.
    assert len(documents) / COUNT == pytest.approx(1 / 16 + 15 / 16 / 25, rel=0.05)
    assert statistics.median(turns) == pytest.approx(600, rel=0.05)
    assert min(documents) >= 16_000
    # An evicted session has grown beyond its document.
    assert max(documents) > 128_000


@pytest.mark.parametrize("name", MIXES)
def test_the_seed_alone_settles_a_mix(name):
    def shape(seed, rate):
        mix = build_mix(name, MixOptions())
        options = WorkloadOptions(
            draw_row=mix.row_draw(),
            classes=mix.slo_classes,
            gaps=mix.gaps,
            rate_rps=rate,
            seed=seed,
        )
        return [
            (r.input_tokens, r.output_tokens, r.slo) for r in itertools.islice(plan(options), 50)
        ]

    assert shape(1, 2.0) == shape(1, 3.0) != shape(2, 2.0)


def test_an_unknown_mix_is_named():
    with pytest.raises(ConfigError, match=r"--mix 'nope'.*qwen.*mixed"):
        build_mix("nope", MixOptions())


def test_lengths_by_few_figures():
    rng = random.Random(3)

    def many(draw):
        return [draw(rng) for _ in range(20_000)]

    by_p = many(lognormal_by_quantiles(518, 808))
    assert statistics.median(by_p) == pytest.approx(518, rel=0.02)
    assert quantile(by_p, 0.9) == pytest.approx(808, rel=0.02)
    flat = many(log_uniform(10, 1000))
    assert quantile(flat, 0.5) == pytest.approx(100, rel=0.05)
    assert (min(flat), max(flat)) == (10, 1000)
    table = many(by_quantiles((10, 20, 120)))
    assert quantile(table, 0.25) == pytest.approx(15, abs=1)
    assert quantile(table, 0.75) == pytest.approx(70, abs=3)
    chosen = many(mixture([1.0, 0.0, 3.0]))
    assert set(chosen) == {0, 2}
    assert chosen.count(0) == pytest.approx(5000, rel=0.05)
    for mean in (10.0, 10.1, 100.0, 5.0, float("nan")):
        with pytest.raises(ConfigError, match="mean length"):
            truncated_lognormal(10, 100, mean)


@pytest.mark.parametrize("prefill", [1, 2, 3, 16])
def test_a_prefill_alone_uses_the_best_group_there_is(prefill):
    profile = load_profile("llama3-8b-a100-tp1")
    isolated_s = isolated_prefill(SimSpec(profile=profile, prefill=prefill, decode=1))
    for tokens in (500, 30_000, 300_000):
        best = min(
            profile.prefill.chunk_s(tokens, 0, sp) for sp in (1, 2, 4, 8, 16) if sp <= prefill
        )
        assert isolated_s(tokens) == best


def test_a_prefill_alone_on_mixed_instances_is_piped():
    profile = load_profile("llama3-8b-a100-tp1")
    packing = PackingConfig(t_target_s=0.05)
    isolated_s = isolated_prefill(SimSpec(profile=profile, mixed=2, spp=4, packing=packing))
    times = PrefillTimes(profile.operators, target_s=0.05, spp=4)
    for tokens in (1024, 9000, 131_072, 700_000):
        assert isolated_s(tokens) == pytest.approx(times.total_s(tokens), rel=0.05)
    assert isolated_s(700_000) > 1.2 * profile.prefill.chunk_s(700_000) / 4  # chunks cost


def test_objectives_for_requests_that_bring_none():
    """Medha's released default: 1.5 x the isolated prefill, at least 0.5 s."""

    def request(tokens, **slo):
        return PlannedRequest(
            index=0,
            arrival_s=0.0,
            input_tokens=tokens,
            output_tokens=1,
            slo=SloClass(name="a", **slo),
        )

    requests = [
        request(100),
        request(2000),
        request(2000, ttft_s=4.0, tbt_s=0.2),
        request(2000, tbt_s=0.1),
    ]
    for scale in (1.0, 0.5):
        found = with_objectives(requests, lambda tokens: tokens * 1e-3, scale)
        objectives = [(r.slo.ttft_s, r.slo.tbt_s) for r in found]
        assert objectives == [
            (0.5 * scale, None),
            (3.0 * scale, None),
            (4.0 * scale, 0.2 * scale),
            (3.0 * scale, 0.1 * scale),
        ]
