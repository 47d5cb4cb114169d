"""Medha section 6 in the simulator: which system is better, with margins well inside the
results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
from rich.console import Console

from millrace.core.errors import ConfigError
from millrace.experiments import EXPERIMENTS, load_experiment
from millrace.experiments import long_context as mn
from millrace.experiments.medha import chunking as medha_chunking
from millrace.experiments.medha import common as medha
from millrace.experiments.medha import convoy as medha_convoy
from millrace.experiments.medha import policies as medha_policies
from millrace.experiments.medha.common import Hour, Load, Spread, run_hour
from millrace.sim.loop import Simulation
from millrace.sim.objectives import isolated_prefill, with_objectives
from millrace.sim.results.report import Collector, RequestRecord
from millrace.sim.workload.workload import PlannedRequest, SloClass

WINDOW_S = 250.0


def seconds(value: float | None) -> float:
    return math.inf if value is None else value


@pytest.fixture(scope="module")
def busy() -> dict[str, Hour]:
    """Runs all of figure 9's and 13's systems at 0.75 requests/s with 5 % long requests."""
    load = Load(qps=0.75, window_s=WINDOW_S)
    systems = medha_convoy.SYSTEMS | medha_policies.SYSTEMS
    return {name: run_hour(build(), load) for name, build in systems.items()}


def test_long_prompts_hold_short_ones_up_unless_prefill_is_preemptive(busy):
    """Figure 9b: tens of times at the median and more in the tail; never so at Medha."""
    ours = busy["Medha"].short
    assert seconds(ours.p99_s) < 1.0
    for name in ("LoongServe", "LoongServe, 6 of 8", "Sarathi-512", "Sarathi-2048"):
        assert seconds(busy[name].short.p90_s) > 20 * seconds(ours.p90_s), name
    for name in ("LoongServe, 6 of 8", "Sarathi-512", "Sarathi-2048"):
        assert seconds(busy[name].short.p50_s) > 8 * seconds(ours.p50_s), name


def test_without_long_prompts_nobody_is_far_behind():
    """Figure 9a at low load."""
    load = Load(qps=0.75, long_fraction=0.0, window_s=WINDOW_S)
    p90_s = [
        seconds(run_hour(build(), load).short.p90_s) for build in medha_convoy.SYSTEMS.values()
    ]
    assert max(p90_s) < 3 * min(p90_s) < 1.0


def test_one_percent_of_long_prompts_is_enough():
    """Section 6.4: worse than in proportion."""

    def p99_s(share: float) -> float:
        load = Load(qps=0.75, long_fraction=share, window_s=900.0)
        return seconds(run_hour(medha.loongserve(), load).short.p99_s)

    assert p99_s(0.01) > 8 * p99_s(0.0)


def test_static_chunks_stretch_what_shares_their_iterations(busy):
    """Figure 10b: TBT even with adaptive chunks, several times longer with large static ones."""
    assert seconds(busy["Medha"].tbt_p99_s) < 0.055
    assert seconds(busy["Sarathi-2048"].tbt_p99_s) > 4 * seconds(busy["Medha"].tbt_p99_s)
    assert seconds(busy["Sarathi-512"].tbt_p99_s) > 1.2 * seconds(busy["Medha"].tbt_p99_s)


def test_lars_beats_the_other_orders(busy):
    """Figure 13 at load: FCFS, EDF and LRS form convoys."""
    lars = seconds(busy["LARS"].short.p90_s)
    for name in ("FCFS", "EDF", "LRS"):
        assert seconds(busy[name].short.p90_s) > 20 * lars, name


def test_multi_prefill_batching_takes_short_prompts_along():
    """Section 4.2: at low load short requests need not wait until they are nearly late."""
    load = Load(qps=0.25, window_s=600.0)
    single, several = (
        seconds(run_hour(medha_policies.SYSTEMS[name](), load).short.p90_s)
        for name in ("LARS", "Medha")
    )
    assert single > 1.3 * several
    operators = mn.operators(mn.A100)
    assert medha_policies.shared_saving(operators, 128) > 1.5
    assert 1.0 < medha_policies.shared_saving(operators, 2048) < 1.3


def test_adaptive_chunks_beat_static_ones_at_equal_tbt():
    """Figure 4: by more, the smaller the chunk."""
    model = mn.operators(mn.H100)
    gains = [medha_chunking.compare(model, chunk).gain for chunk in (64, 256, 2048)]
    assert gains[0] > 1.1 and gains[2] > 1.0
    assert gains == sorted(gains, reverse=True)


def beside_shorts(tokens: int, every_s: float, until_s: float) -> Iterator[PlannedRequest]:
    """One long prompt at 0 s, then short ones with outputs that keep the batch decoding."""
    yield PlannedRequest(
        index=0, arrival_s=0.0, input_tokens=tokens, output_tokens=2, slo=SloClass(name="long")
    )
    for index in range(1, round(until_s / every_s)):
        yield PlannedRequest(
            index=index,
            arrival_s=index * every_s,
            input_tokens=1500,
            output_tokens=400,
            slo=SloClass(name="short"),
        )


def test_a_history_too_long_for_the_target_does_not_starve():
    """From 60k tokens on, 512 tokens take more than 20 ms, and other requests never stop
    arriving."""
    spec = medha.medha(t_target_s=0.02, min_chunk_tokens=512)
    records: list[RequestRecord] = []
    requests = with_objectives(beside_shorts(200_000, 1.0, 120.0), isolated_prefill(spec))
    Simulation(spec, requests, Collector(records.append)).run()
    long = next(record for record in records if record.index == 0)
    assert long.ttft_s < 20.0
    assert long.longest_suspension_s < 2.0
    assert max(record.tbt_s for record in records if record.tbt_s is not None) < 0.06


def test_quantiles_are_of_all_that_arrived():
    values = [0.1] * 50 + [0.4] * 45 + [math.inf] * 5
    found = Spread.of(values, 95)
    assert (found.requests, found.ended) == (100, 95)
    assert (found.p50_s, found.p90_s, found.p99_s) == (0.1, 0.4, None)
    assert Spread.of([], 0).p50_s is None
    assert medha.ratio(None, 1.0) == "never" and medha.ratio(3.0, None) == "-"
    assert medha.ratio(3.0, 2.0) == "1.5"


def test_capacity_ends_at_the_first_rate_that_fails(busy):
    slow = replace(busy["Medha"], total=busy["Sarathi-512"].total)
    fast = busy["Medha"]
    assert medha_convoy.capacity([(1.0, fast), (2.0, slow), (3.0, fast)]) == 1.0
    assert medha_convoy.capacity([(1.0, slow)]) == 0.0


@pytest.mark.parametrize("module", [medha_convoy, medha_policies])
def test_its_document_and_plot(module, tmp_path):
    outcome = module.compare(lambda _: None, (0.75,), 65.0)
    document, plot = tmp_path / "found.json", tmp_path / "found.png"
    outcome.publish(Console(quiet=True), document, plot)
    found = json.loads(document.read_text())
    assert found["results"]["by_qps"]["Medha"]["0.75"]["short"]["requests"] > 0
    assert any("synthetic" in assumption for assumption in found["assumptions"])
    assert plot.stat().st_size > 10_000


def test_short_requests_may_come_from_a_trace(tmp_path):
    trace = tmp_path / "lengths.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n16,2\n16,2\n")
    drawn = Load(qps=1.0, long_fraction=0.1, trace=trace).scenario(medha.medha()).requests()
    tokens = {request.slo.name: request.input_tokens for request in islice(drawn, 100)}
    assert tokens["short"] == 16 and tokens["long"] > 100_000
    assert load_experiment("medha-convoy", trace=trace).measure is medha_convoy.measure
    with pytest.raises(ConfigError, match="takes no --trace; medha-convoy"):
        load_experiment("mnemosyne-kvp", trace=trace)


def test_experiments_are_known_by_name():
    for name in EXPERIMENTS:
        assert callable(load_experiment(name).run)
    with pytest.raises(ConfigError, match="medha-convoy"):
        load_experiment("medha")
