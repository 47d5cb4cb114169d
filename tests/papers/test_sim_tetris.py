"""Tetris's experiments in small: which system is better, and by how much at least.

Sections 2.4 and 7.2 to 7.4. All runs are of fixed seeds; margins leave room for other draws.
"""

from __future__ import annotations

import json

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from millrace.cli.sim.command import register
from millrace.core.config import SchedulerConfig
from millrace.core.cost.rates import ImprovementRates
from millrace.experiments import EXPERIMENTS, load_experiment
from millrace.experiments.tetris import common as paper
from millrace.experiments.tetris.common import LOONGSERVE, SINGLE_CHUNK, TESTBEDS, TETRIS
from millrace.experiments.tetris.examples import long_behind_short, two_requests
from millrace.experiments.tetris.fig14 import balancing, halved, transfer
from millrace.experiments.tetris.load import load_test
from millrace.experiments.tetris.table1 import TABLE_1
from millrace.experiments.tetris.table1 import measure as measure_table_1
from millrace.sim.studies.rate_profile import RATES, profile_rates

SMALL = TESTBEDS["8b"]


#: Experiments that take 10 s even in small. Their systems are compared below all the same.
LARGE = ("tetris-fig8", "tetris-fig9")
SIZE = paper.Size(duration_s=60.0, least=120)


def p50_s(config, rate_rps, size=SIZE):
    return paper.point(paper.scenario(SMALL, "short", config), rate_rps, size).p50_s


def cdsp(rate):
    return paper.scheduler(planner="cdsp", improvement_rate=rate)


def test_table_1_is_reproduced_exactly():
    """ "Prefill latency": every time, and the best SP degree of every length (in bold)."""
    results = measure_table_1(False, print).results
    best = {4: 4, 8: 4, 16: 8, 32: 16, 64: 16, 128: 16, 256: 16}
    assert results["best_sp"] == {k * 1024: sp for k, sp in best.items()}
    for sp, row in TABLE_1.items():
        for found, seconds in zip(results["seconds"][sp], row.values(), strict=True):
            assert found["s"] == pytest.approx(seconds, rel=1e-12)


def test_the_examples_of_section_2_4():
    """ "(1.53s, 1.84s)", "(1.58s, 1.31s)", and "a 1.34-second TTFT increase" """
    assert [plan.ttft_s for plan in two_requests("esp")] == pytest.approx([1.53, 1.84])
    assert [plan.ttft_s for plan in two_requests("cdsp")] == pytest.approx([1.58, 1.31])
    wide, narrow, chunked = map(long_behind_short, ("esp", "fixed_sp", "cdsp"))
    assert narrow.ttft_s - wide.ttft_s == pytest.approx(1.34)
    assert chunked.ttft_s < wide.ttft_s - 0.05


def test_under_load_every_baseline_is_slower():
    """Section 7.2: fixed SP 16 is worst, LoongServe between the two, Tetris ahead."""
    configs = paper.systems(SMALL, "short")
    found = {name: p50_s(configs[name], 5.0) for name in configs}
    assert 1.5 * found[TETRIS] < found["Fixed SP 8"] < found[LOONGSERVE]
    assert 3 * found[LOONGSERVE] < found["Fixed SP 16"]


@pytest.mark.slow
def test_tetris_carries_more_than_the_best_baseline():
    """Section 7.2: "Tetris enhances the max load by 21%-43%" """
    configs = paper.systems(TESTBEDS["70b"], "short")
    compared = {name: configs[name] for name in (TETRIS, LOONGSERVE)}
    size = paper.Size(duration_s=200.0, least=60, stride=2, tolerance=0.05)
    test = load_test(TESTBEDS["70b"], "short", compared, size=size, announce=lambda text: None)
    best = test.best([LOONGSERVE])
    assert test.curves[TETRIS].capacity_rps > 1.2 * test.curves[best].capacity_rps
    rates_rps = [point.rate_rps for point in test.curves[TETRIS].points]
    assert rates_rps == sorted(rates_rps) and test.curves[TETRIS].capacity_rps in rates_rps


def test_low_improvement_rates_suit_light_load_and_high_ones_heavy_load():
    """Section 7.3: "under low request rates [...] smaller"; "as request load increases" larger."""
    light = {rate: p50_s(cdsp(rate), 0.5) for rate in (0.1, 0.7)}
    heavy = {rate: p50_s(cdsp(rate), 7.0) for rate in (0.1, 0.7)}
    assert light[0.1] < 0.9 * light[0.7]
    assert heavy[0.7] < 0.8 * heavy[0.1]
    dynamic = paper.systems(SMALL, "short")[TETRIS]
    assert p50_s(dynamic, 0.5) < 1.05 * light[0.1]
    assert p50_s(dynamic, 7.0) < 0.85 * heavy[0.1]  # starts with 0.3 for 30 s


def test_profiling_finds_rates_that_rise_with_the_load():
    of = paper.scenario(SMALL, "short", cdsp(0.3), requests=150, seed=5)
    told = []
    rows = profile_rates(of, (7.0, 0.5), (0.1, 0.7), lambda *run: told.append(run))
    assert [(row.arrivals_rps, row.best) for row in rows] == [(0.5, 0.1), (7.0, 0.7)]
    assert told == [(0.5, 0.1), (0.5, 0.7), (7.0, 0.1), (7.0, 0.7)]
    assert rows[0].mean_ttft_s[0.1] < rows[0].mean_ttft_s[0.7]


def test_the_shipped_tables_span_what_the_paper_explores():
    """Section 7.1: rates from 0.05 to 0.75, low under light load and high near saturation."""
    for by_trace in paper.shipped_rates().values():
        assert set(by_trace) == set(paper.TRACES)
        for table in by_trace.values():
            assert isinstance(table, ImprovementRates)
            rates = [rate for _, rate in table.rows]
            assert 0.05 <= min(rates) <= 0.1 and 0.5 <= max(rates) <= 0.75


def test_chunks_help_when_queues_differ_and_never_cost_much():
    """Section 7.3: under light load a single chunk is enough; under more it is slower."""
    configs = paper.systems(SMALL, "short")
    alone = {
        rate: p50_s(configs[SINGLE_CHUNK], rate) / p50_s(configs[TETRIS], rate)
        for rate in (0.5, 7.0)
    }
    assert alone[0.5] == pytest.approx(1.0, abs=0.02)
    assert alone[7.0] > 1.03


@pytest.mark.parametrize("key", TESTBEDS)
def test_balancing_hides_behind_the_layer_before(key):
    """Section 7.4: "up to 1.8% extra overhead", more with more history."""
    for rows in balancing(key, TESTBEDS[key]).values():
        added = [share for _, share in rows]
        assert 0 < added[0] < added[-1] < 0.018


def test_transfer_hides_behind_prefill_unless_backends_are_few():
    """Section 7.4: "0.6%-11.8%" with backends to spare, more with half of them."""
    assert all(share < 0.118 for _, share in transfer(SMALL))
    found = halved("8b", SMALL, "short", paper.QUICK)
    assert found["enough"] < 0.005 < found["half"] < 0.3


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else [])
        for name in EXPERIMENTS
        if name.startswith("tetris")
    ],
)
def test_a_quick_run_writes_what_it_found(name, tmp_path):
    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    console = Console(width=100, record=True)
    load_experiment(name).run(console, found, picture, True)
    document = json.loads(found.read_text())
    assert document["findings"] and document["results"]
    assert "paper" in console.export_text()
    assert picture.exists() == (name != "tetris-examples")


def test_profile_rates_prints_the_settings_that_hold_its_table(tmp_path):
    """Section 5.1: the records that the scheduler queries while it serves."""
    app, found = typer.Typer(), tmp_path / "rates.json"
    register(app)
    words = "profile-rates --mix tetris-short --requests 80 --arrivals 7,0.5 --rates 0.7,0.1"
    run = CliRunner().invoke(app, [*words.split(), "--prefill", "8", "--json", str(found)])
    assert run.exit_code == 0, run.output
    printed = dict(line.split("=") for line in run.output.splitlines() if "scheduler." in line)
    assert printed["scheduler.improvement_rate"] == "-1"
    setting = printed["scheduler.improvement_rates"]
    assert setting == "0.5:0.1,7:0.7"
    assert json.loads(found.read_text())["results"]["improvement_rates"] == setting
    SchedulerConfig(improvement_rate=-1.0, improvement_rates=setting)


def test_profile_rates_tries_all_rates_of_the_paper(tmp_path):
    """Section 7.1: "ranging from 0.05 to 0.75"; without --rates the command had none to try."""
    app, found = typer.Typer(), tmp_path / "rates.json"
    register(app)
    words = "profile-rates --mix tetris-short --requests 5 --arrivals 1,1 --json"
    run = CliRunner().invoke(app, [*words.split(), str(found)])
    assert run.exit_code == 0, run.output
    (row,) = json.loads(found.read_text())["results"]["rows"]
    assert [float(rate) for rate in row["mean_ttft_s"]] == list(RATES)
