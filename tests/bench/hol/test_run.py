"""`millrace bench hol`: its systems, traffic, search and report, and the parts in this process."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
import typer
from rich.console import Console

from millrace.bench.common.random_model import write_random_llama
from millrace.bench.common.report import RequestRecord
from millrace.bench.hol import command as hol
from millrace.bench.hol import pool as hol_pool
from millrace.bench.hol import report as hol_report
from millrace.bench.hol import run as hol_run
from millrace.bench.hol import simulated as hol_sim
from millrace.bench.hol.search import goodput
from millrace.bench.hol.systems import NAMES, systems
from millrace.bench.hol.traffic import (
    Attainment,
    Traffic,
    Watch,
    capacity_rps,
    mean_tokens,
    multiples,
    objectives,
)
from millrace.core.config import EngineConfig, load_config
from millrace.core.errors import ConfigError
from millrace.engine.assembly import open_engine
from millrace.experiments.flowprefill import common as flowprefill
from millrace.sim.workload.workload import PlannedRequest, SloClass, plan

TINY = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
ISOLATED_S = {"text": 0.03, "image": 0.03, "search": 0.2, "file": 0.25}


def traffic(requests=50, **changes):
    settings = {"scale": 20.0, "requests": requests, "most_tokens": 2000, **changes}
    return Traffic(classes=tuple(objectives(ISOLATED_S)), **settings)


# ---- systems


def test_every_system_is_a_valid_configuration():
    found = systems(NAMES, 20.0)
    assert tuple(system.name for system in found) == NAMES
    for system in found:
        config = load_config(overrides=system.settings)
        assert config.scheduler.policy == system.policy
        assert config.engine.max_chunk_tokens == system.chunk_tokens
    small, large = found[1], found[2]
    assert (small.chunk_tokens, large.chunk_tokens, found[3].batch_tokens) == (102, 410, 102)


def test_only_the_systems_asked_for_in_their_own_order():
    assert [one.name for one in systems(("millrace", "fcfs"), 1.0)] == ["fcfs", "millrace"]
    assert systems(("edf-small",), 1e6)[0].chunk_tokens == 1


# ---- traffic


def test_objectives_are_the_papers_multiples_of_isolated_ttfts():
    times = multiples()
    assert times == pytest.approx(
        {"text": 5.85, "image": 12.78, "search": 9.84, "file": 12.84}, abs=0.01
    )
    found = {one.name: one.ttft_s for one in objectives(ISOLATED_S, 2.0)}
    assert found == pytest.approx({name: 2 * times[name] * s for name, s in ISOLATED_S.items()})


def test_capacity_is_what_the_mean_request_leaves():
    work_s = 0.68 * 0.03 + 0.08 * 0.03 + 0.2 * 0.2 + 0.04 * 0.25
    assert capacity_rps(ISOLATED_S) == pytest.approx(1 / work_s)


def test_a_rate_stretches_the_gaps_and_leaves_the_requests_alone():
    slow, fast = (list(plan(traffic().at(rate, seed=3))) for rate in (2.0, 8.0))
    assert [r.input_tokens for r in slow] == [r.input_tokens for r in fast]
    assert [r.slo for r in slow] == [r.slo for r in fast]
    assert [r.arrival_s for r in slow] == pytest.approx([4 * r.arrival_s for r in fast])
    assert {r.output_tokens for r in slow} == {1}
    assert [r.input_tokens for r in plan(traffic().at(2.0, seed=4))] != [
        r.input_tokens for r in slow
    ]


def test_a_run_lasts_several_objectives() -> None:
    found = [list(plan(traffic(least_s=40.0).at(rate, seed=3))) for rate in (1.0, 8.0)]
    assert [len(one) for one in found] == [50, 320]  # 50 at least
    assert found[1][-1].arrival_s == pytest.approx(40.0, rel=0.2)
    assert [r.input_tokens for r in found[1][:50]] == [r.input_tokens for r in found[0]]


def test_no_order_carries_more_than_the_shortest_requests_leave() -> None:
    """Table 1's shares: searches and files are 24 % of the requests and nearly all the work."""
    requests = traffic()
    all_s = {r.index: float(r.input_tokens) for r in plan(traffic(requests=4000).at(1.0, 0))}
    kept_s = sorted(all_s.values())[:3600]
    assert requests.most_rps(float, 0) == pytest.approx(4000 / sum(kept_s))
    fair = requests.most_rps(float, 0, 0.8)  # a fifth of the longs at most: 5 % of all
    assert 4000 / sum(all_s.values()) < fair < requests.most_rps(float, 0)
    assert requests.most_rps(float, 0, 1.0) == pytest.approx(4000 / sum(all_s.values()))
    assert requests.most_rps(lambda tokens: 0.5, 0) == pytest.approx(2.0 / 0.9)


def test_lengths_are_table_1s_over_the_scale():
    requests = list(plan(traffic(requests=4000).at(1.0, seed=0)))
    for name, mean in mean_tokens(20.0).items():
        own = [r.input_tokens for r in requests if r.slo.name == name]
        assert sum(own) / len(own) == pytest.approx(mean, rel=0.15)
    assert max(r.input_tokens for r in plan(traffic(most_tokens=300).at(1.0, 0))) == 300


# ---- the results of a run, and its end


def watch(*objectives_s):
    return Watch(
        planned=tuple(
            PlannedRequest(
                index=index,
                arrival_s=float(index),
                input_tokens=1,
                output_tokens=1,
                slo=SloClass(name="text", ttft_s=objective_s),
            )
            for index, objective_s in enumerate(objectives_s)
        ),
        grace_s=0.0,
    )


def record(index, ttft_s, error=""):
    return RequestRecord(
        index=index,
        class_name="text",
        input_tokens=1,
        asked_tokens=1,
        sent_s=float(index),
        token_times_s=[index + ttft_s],
        ended_s=index + ttft_s,
        error=error,
        detail="full" if error else "",
    )


def test_a_run_is_over_when_every_outcome_is_known():
    seen = watch(*[0.5] * 9, 3.0)
    for index in range(8):
        seen.end(record(index, 0.4))
    assert not seen.is_over(8.6)  # the ninth is late, the last has until 12 s
    seen.end(record(9, 2.9))
    assert seen.is_over(11.9)
    found = seen.attainment(7.0, 11.9)
    assert (found.total, found.stopped, found.carried) == (0.9, False, True)
    assert found.by_class == {"text": 0.9}


def test_a_request_that_ends_late_or_fails_has_missed():
    seen = watch(0.5, 0.5)
    seen.end(record(0, 0.6))
    seen.end(record(1, 0.1, error="http 429"))
    found = seen.attainment(1.0, 2.0)
    assert found.met == {"text": 0} and found.errors == {"http 429: full": 1}


def test_a_hopeless_run_ends_early_and_is_not_carried():
    seen = watch(*[0.5] * 20)  # two misses are allowed
    assert not seen.is_over(4.4)
    assert seen.is_over(4.6)  # the fifth
    found = seen.attainment(1.0, 4.6)
    assert found.stopped and not found.carried and sum(found.known.values()) == 5


def test_ninety_percent_is_carried():
    at = {"text": 10}
    assert Attainment(rate_rps=1.0, met={"text": 9}, known=at).carried
    assert not Attainment(rate_rps=1.0, met={"text": 8}, known=at).carried
    assert not Attainment(rate_rps=1.0, met={"text": 9}, known=at, stopped=True).carried


def test_every_class_has_four_fifths() -> None:
    at = {"text": 90, "file": 10}
    enough = Attainment(rate_rps=1.0, met={"text": 90, "file": 8}, known=at)
    assert enough.carried and enough.carried_by_class
    too_few = Attainment(rate_rps=1.0, met={"text": 90, "file": 7}, known=at)
    assert too_few.carried and not too_few.carried_by_class
    assert not Attainment(rate_rps=1.0, met={"text": 80, "file": 9}, known=at).carried_by_class


# ---- search


def searched(limit, start, **changes):
    tried = []

    async def one(rate_rps):
        tried.append(rate_rps)
        met = {"text": 10 if rate_rps <= limit else 5}
        return Attainment(rate_rps=rate_rps, met=met, known={"text": 10})

    settings = {"tolerance": 0.12, "step": 1.25, "most_runs": 20, **changes}
    return asyncio.run(goodput(one, start, **settings)), tried


@pytest.mark.parametrize("start", [1.0, 4.0, 5.0, 20.0])
def test_the_goodput_is_bracketed(start):
    found, tried = searched(5.0, start)
    assert found.rate_rps <= 5.0 < found.failed_rps <= 1.12 * found.rate_rps * (1 + 1e-9)
    assert [run.rate_rps for run in found.runs] == sorted(tried)
    assert found.at_edge.rate_rps == found.rate_rps


def test_another_goal_is_searched():
    async def one(rate_rps):
        met = {"text": 90, "file": 10 if rate_rps <= 2.0 else 5}
        return Attainment(rate_rps=rate_rps, met=met, known={"text": 90, "file": 10})

    def search(**goal):
        settings = {"tolerance": 0.12, "step": 1.25, "most_runs": 8}
        return asyncio.run(goodput(one, 1.0, **settings, **goal))

    assert search().failed_rps is None
    fair = search(goal=lambda run: run.carried_by_class)
    assert fair.rate_rps <= 2.0 < fair.failed_rps


def test_a_search_ends_after_so_many_runs():
    found, tried = searched(100.0, 1.0, most_runs=3)
    assert (len(tried), found.rate_rps, found.failed_rps) == (3, 1.25**2, None)
    found, _ = searched(0.1, 1.0, most_runs=2)
    assert (found.rate_rps, found.failed_rps, found.at_edge) == (0.0, 0.8, None)


# ---- simulated


def test_the_simulated_systems_come_in_the_papers_order():
    profile = flowprefill.operator_profile("llama3-8b-a100-tp1")
    alone = {n: profile.prefill.isolated_s(t) for n, t in mean_tokens(1.0).items()}
    requests = Traffic(
        classes=tuple(objectives(alone)), scale=1.0, requests=300, most_tokens=100_000
    )
    found = {
        system.name: hol_sim.attainment(system, profile, requests, 6.0, 0, 0.0)
        for system in systems(NAMES, 1.0)
    }
    assert all(sum(one.known.values()) == 300 for one in found.values())
    assert found["fcfs"].total < 0.8 < found["s-edf"].total
    assert found["millrace"].carried
    late = hol_sim.attainment(systems(NAMES, 1.0)[-1], profile, requests, 6.0, 0, 0.24)
    assert late.met["text"] == 0 < late.met["search"]


# ---- in this process


@pytest.fixture
def engine(tmp_path):
    write_random_llama(tmp_path, TINY)
    return open_engine(
        tmp_path, EngineConfig(dtype="float32", threads=1, kv_bytes=1 << 22, device="cpu")
    )


@pytest.mark.parametrize(
    ("granularity", "chunk_tokens"), [("operator", 1024), ("layer", 1024), ("chunk", 50)]
)
def test_preemptions_take_effect(engine, granularity, chunk_tokens):
    found = hol_pool.blocking(
        engine,
        tokens=400,
        chunk_tokens=chunk_tokens,
        granularity=granularity,
        budget_s=0.3,
        seed=0,
    )
    assert found.signals >= hol_pool.LEAST_SIGNALS
    assert 0 < found.median_ms <= found.p99_ms <= found.longest_ms
    assert found.deciles_ms[5] == found.median_ms and found.deciles_ms[-1] == found.longest_ms
    assert found.longest_operator_ms > 0
    assert found.chunk_tokens == min(chunk_tokens, 400)
    engine.pool.check_integrity(expected_used=0)


def test_the_pool_computes_what_the_bare_loop_does(engine):
    long = hol_pool.LongPrefill(engine, 100, 30)
    steps = list(long.steps(hol_pool.Pace()))
    assert [task.history_tokens for task in long.passes()] == [0, 30, 60, 90]
    assert steps.count(hol_pool.StopPoint.PASS) == 4
    # A pass without logits ends at the last layer's attention.
    assert steps.count(hol_pool.StopPoint.LAYER) == 3 * 2 + 3
    long.free()
    found = hol_pool.checks(engine, tokens=100, rounds=3)
    assert found.bare_s > 0 and found.pool_s > 0 and -1 < found.cost < 10
    engine.pool.check_integrity(expected_used=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": 200.0, "long_tokens": 512}, "--long-tokens is 512 tokens"),
        ({"scale": 20.0, "long_tokens": 64}, "--scale 20: a long file is 1120 tokens"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(monkeypatch, changes, message):
    monkeypatch.setattr(hol_run, "LLAMA_27M", TINY)
    with pytest.raises(ConfigError, match=message + ".* at most 511"):
        asyncio.run(hol_run.run(hol_run.Settings(**changes)))


# ---- a whole run, and its report


@pytest.fixture(scope="module")
def document():
    """Runs one system at one rate on a model that takes no time: the test is that all parts run."""
    settings = hol_run.Settings(
        systems=("fcfs", "millrace"),
        scale=200.0,
        slo_scale=5000.0,  # met on any machine
        requests=10,
        run_objectives=0.0,
        rates=(20.0,),
        repeats=1,
        shorts=2,
        long_tokens=400,
        profile_s=0.2,
        blocking_s=0.1,
        check_rounds=1,
        kv_bytes=1 << 22,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hol_run, "LLAMA_27M", TINY)
        return asyncio.run(hol_run.run(settings))


def test_a_whole_run(document):
    found = json.loads(json.dumps(document))
    assert set(found["goodput"]) == {"fcfs", "millrace"} == set(found["interrupted"])
    ours = found["goodput"]["millrace"]
    (only,) = ours["runs"]
    assert only["rate_rps"] == ours["live_rps"] == 20.0 and only["total"] >= 0.9
    assert ours["live_ratio"] == 1.0
    assert len(found["interrupted"]["fcfs"]["ttft_ms"]) == 2
    assert [one["granularity"] for one in found["blocking"]] == [
        "operator",
        "layer",
        "chunk",
        "chunk",
    ]
    assert found["took_s"] > 0 and found["profile"]["layers"] == 3


def test_the_report_shows_every_part(document, tmp_path):
    console = Console(record=True, width=200, file=io.StringIO())
    hol_report.print_tables(document, console)
    text = console.export_text()
    for part in ("Classes", "Goodput", "Blocking", "Checks", "TTFT of a short prompt", "millrace"):
        assert part in text
    hol_report.draw(document, tmp_path / "hol.png")
    assert (tmp_path / "hol.png").read_bytes().startswith(b"\x89PNG")


def test_quick_is_less_of_everything():
    settings = hol_run.Settings()
    quick = settings.quick()
    assert set(quick.systems) < set(settings.systems) and "fcfs" in quick.systems
    for name in ("requests", "most_runs", "profile_s", "blocking_s", "check_rounds", "shorts"):
        assert getattr(quick, name) < getattr(settings, name)
    assert hol_run.Settings(systems=("s-edf",)).quick().systems == ("s-edf",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float16"}, "'float16' is not one of"),
        ({"systems": "fcfs,fifo"}, "'fifo' is not one of"),
        ({"rates": "1,0"}, "--rates '1,0'"),
        ({"rates": "1,fast"}, "--rates '1,fast'"),
        ({"seeds": "0,x"}, "--seeds '0,x'"),
    ],
)
def test_options_that_make_no_sense(arguments, message):
    with pytest.raises(typer.BadParameter, match=message):
        hol.command(**arguments)


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    with pytest.raises(typer.Exit):
        hol.command(model=str(tmp_path / "none"))
    assert "none" in capsys.readouterr().err
