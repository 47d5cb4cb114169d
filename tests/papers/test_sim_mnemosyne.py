"""Mnemosyne section 6 in the simulator: the shape of its figures, with margins."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from millrace.core.instance.packing import PackingConfig
from millrace.experiments import load_experiment
from millrace.experiments import long_context as mn
from millrace.experiments.mnemosyne import batching as mnemosyne_batching
from millrace.experiments.mnemosyne import kvp as mnemosyne_kvp
from millrace.experiments.mnemosyne import spp as mnemosyne_spp
from millrace.experiments.mnemosyne import tradeoff as mnemosyne_tradeoff
from millrace.profiles import load_profile

H100 = mn.operators(mn.H100)
BESIDE = mn.Beside(decodes=1)


def saved(degree: int, context: int) -> float:
    """Returns the share of a decode step that `degree` workers save."""
    stages = mnemosyne_kvp.STAGES
    return 1 - mn.step_s(H100, context, stages, degree) / mn.step_s(H100, context, stages)


def test_kvp_shortens_decode_steps_more_the_longer_the_context():
    """Figure 17: 40 % with two workers at 10M tokens; 1.7x and 2.5x with four at 4M and 10M."""
    assert saved(2, 10_000_000) == pytest.approx(0.40, abs=0.05)
    assert 1 / (1 - saved(4, 4_000_000)) == pytest.approx(1.7, abs=0.25)
    assert 1 / (1 - saved(4, 10_000_000)) == pytest.approx(2.5, abs=0.3)
    gains = [saved(4, millions * 1_000_000) for millions in (1, 2, 4, 10)]
    assert gains == sorted(gains)
    assert gains[0] < 0  # and costs at contexts that need none


def test_iterations_stay_level_as_workers_join():
    """Figure 19: three workers join a prefill of 2M tokens, at every 500k."""
    packing = mn.static(1024, mn.Beside())
    alone = mnemosyne_kvp.grow(H100, packing, mn.NO_KVP, 2_000_000)
    grown = mnemosyne_kvp.grow(H100, packing, mnemosyne_kvp.GROWTH, 2_000_000)
    assert alone.unevenness > 1.7
    assert grown.unevenness < 1.3
    assert len(grown.onboarded_at) == 3 and not alone.onboarded_at
    for at, boundary in zip(grown.onboarded_at, (500_000, 1_000_000, 1_500_000), strict=True):
        assert boundary - 1024 < at <= boundary
    assert grown.ttft_s < 0.7 * alone.ttft_s


def test_kvp_buys_larger_chunks_at_the_same_target():
    """Medha section 3.3: TTFT falls, TBT stays."""
    packing = PackingConfig(t_target_s=mnemosyne_kvp.TBT_TARGET_S)
    alone = mnemosyne_kvp.grow(H100, packing, mn.NO_KVP, 1_000_000)
    grown = mnemosyne_kvp.grow(H100, packing, mnemosyne_kvp.GROWTH, 1_000_000)
    assert max(alone.worst_s, grown.worst_s) <= mnemosyne_kvp.TBT_TARGET_S
    assert grown.ttft_s < 0.85 * alone.ttft_s


def test_workers_shorten_a_prefill_in_small_chunks_where_the_context_is_long():
    """Section 6.4, figure 18: at 1M tokens one worker is faster, at 2M equal, at 4M slower."""
    (small, *_, large), most = mnemosyne_tradeoff.CHUNKS, mnemosyne_tradeoff.DEGREES[-1]
    ratios = []
    for tokens in mnemosyne_tradeoff.CONTEXTS:
        one = {n: mnemosyne_tradeoff.point(H100, tokens, 1, n) for n in (small, large)}
        four = {n: mnemosyne_tradeoff.point(H100, tokens, most, n) for n in (small, large)}
        ratios.append(four[small].ttft_s / one[small].ttft_s)
        assert four[large].ttft_s < one[large].ttft_s
        assert four[large].p95_tbt_s < one[large].p95_tbt_s
        assert one[large].ttft_s < one[small].ttft_s
        assert one[large].p95_tbt_s > one[small].p95_tbt_s
    assert ratios[0] > 1.1
    assert ratios[1] == pytest.approx(1.0, abs=0.05)
    assert ratios[2] < 0.9


def test_the_points_of_figure_18_are_those_of_all_iterations():
    tokens, chunk, stages = 400_000, 256, mnemosyne_tradeoff.STAGES
    ran = list(mn.passes(H100, mn.static(chunk, BESIDE), tokens, BESIDE))
    staged = [mn.staged_s(H100, one.seconds, stages) for one in ran]
    found = mnemosyne_tradeoff.point(H100, tokens, 1, chunk)
    assert found.ttft_s == pytest.approx(sum(staged) + (stages - 1) * staged[-1], rel=0.01)
    p95_s = mn.summary(ran).p95_s
    assert found.p95_tbt_s == pytest.approx(stages * mn.staged_s(H100, p95_s, stages), rel=0.01)


def test_decode_steps_of_long_contexts_use_the_bandwidth():
    """Figure 21: up to 92 %, less with more workers."""
    kv_bytes = load_profile(mn.H100).kv_bytes_per_token
    used = [mnemosyne_tradeoff.utilisation(H100, kv_bytes, 10_000_000, k) for k in (1, 2, 4)]
    assert used == sorted(used, reverse=True)
    assert 0.7 < used[0] < 0.92


def test_stages_divide_a_long_prefill():
    """Figure 15: above 80 % of linear at 16 stages."""
    one_s, sixteen_s = (mnemosyne_spp.prefill_s(1_000_000, stages) for stages in (1, 16))
    assert one_s > 16 * 0.8 * sixteen_s
    assert sixteen_s > one_s / 16  # the pipeline has to fill
    assert sixteen_s < 15.0  # figure 14a
    assert mnemosyne_spp.hold_s(H100, 1_000_000, 16) < 0.062  # figure 14b


def test_the_simulator_agrees_with_a_walk_through_the_passes():
    packing = mn.static(mnemosyne_spp.CHUNK_TOKENS, mn.Beside())
    walked = mn.summary(list(mn.passes(H100, packing, 300_000, mn.Beside())))
    assert mnemosyne_spp.prefill_s(300_000, 1) == pytest.approx(walked.total_s)


def test_utilisation_is_what_the_paper_reports():
    """Figure 20: 50 to 60 %; 1M tokens at one stage."""
    ttft_s = mnemosyne_spp.prefill_s(1_000_000, 1)
    assert 0.4 < mnemosyne_spp.flops(1_000_000) / (8 * 989e12 * ttft_s) < 0.65


def test_decodes_ride_along_with_chunks_of_512_and_more():
    """Figure 22: 128 of them, at most 5 %."""
    for chunk in (512, 1024, 2048):
        assert mnemosyne_batching.increase(H100, chunk, 128) < 0.05
    assert mnemosyne_batching.increase(H100, 512, 16) < mnemosyne_batching.increase(H100, 512, 128)


def test_small_chunks_cost_attention_little():
    """Figure 7: 11 % more with 32 tokens than with 2048."""
    large = mn.operators(mn.LARGE_H100)
    full_s = mnemosyne_batching.attention_s(large, 2048)
    assert mnemosyne_batching.attention_s(large, 32) < 1.25 * full_s
    assert mnemosyne_batching.attention_s(large, 64) < 1.10 * full_s


@pytest.mark.parametrize(
    "name",
    [
        *("mnemosyne-kvp", "mnemosyne-spp", "mnemosyne-batching", "mnemosyne-tradeoff"),
        "medha-chunking",
    ],
)
def test_its_document_and_plot(name, tmp_path):
    document, plot = tmp_path / "found.json", tmp_path / "found.png"
    load_experiment(name).run(Console(quiet=True), document, plot, True)
    found = json.loads(document.read_text())
    assert found["results"] and all(finding["ours"] for finding in found["findings"])
    assert plot.stat().st_size > 10_000
