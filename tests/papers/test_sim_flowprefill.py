"""FlowPrefill section 6 in the simulator, in small: which system is better, and by how much at
least.

The full experiments and their figures are in docs/papers/index.md. Margins are wide: 300 requests.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from millrace.core.cost.operators import BatchShape
from millrace.experiments import EXPERIMENTS, load_experiment
from millrace.experiments.flowprefill import common as fp
from millrace.experiments.flowprefill import fig3
from millrace.experiments.flowprefill import rounds as flowprefill_rounds
from millrace.experiments.flowprefill.fig9 import SYSTEMS
from millrace.experiments.flowprefill.fig10 import SYSTEMS as POLICIES
from millrace.experiments.flowprefill.fig11 import SYSTEMS as BUDGETS
from millrace.experiments.flowprefill.fig11 import flood
from millrace.experiments.flowprefill.fig12 import blocking, expected_ratio
from millrace.experiments.flowprefill.fig15 import SYSTEMS as CHUNKED
from millrace.experiments.flowprefill.fig15 import longest_blocking_ms
from millrace.experiments.flowprefill.fig16 import SYSTEMS as COLOCATED
from millrace.sim.models.prefill_work import PrefillTimes
from millrace.sim.scenario import simulate

SIZE = replace(fp.QUICK, tolerance=0.1)
MODEL = "Llama-3-8B"


def quiet(text: str) -> None:
    """Ignores progress texts."""


def test_figure_3_small_chunks_cost_throughput() -> None:
    operators = fp.operator_profile(fp.MODELS[MODEL]).operators
    seconds = [fig3.chunked_s(operators, chunk) for chunk in fig3.CHUNKS]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.3 * seconds[-1]


def test_figure_4_batches_are_for_short_prompts() -> None:
    """Section 3.2: throughput rises and latency hardly; long ones gain little, and wait."""
    operators = fp.operator_profile(fp.MODELS[MODEL]).operators
    slower = {n: fig3.batch_s(operators, n, 8) / fig3.batch_s(operators, n, 1) for n in (32, 8192)}
    assert slower[32] < 2.0
    assert 7.0 < slower[8192] < 8.0


def test_figure_9_goodput() -> None:
    found = fp.compare(SYSTEMS, MODEL, "rate", 3.0, SIZE, quiet)
    assert found.ratio("FlowPrefill", "DistServe") > 4.0  # paper: 4.7-5.6
    assert found.ratio("FlowPrefill", "DistServe-CP2K") > 1.7  # up to 2.0
    assert found.ratio("FlowPrefill", "DistServe-CP8K") > 3.0  # up to 4.5
    assert found.ratio("DistServe-CP2K", "DistServe-CP8K") > 1.5


@pytest.mark.slow
def test_figure_9_tighter_objectives() -> None:
    found = fp.compare(SYSTEMS, MODEL, "slo-scale", 3.0, SIZE, quiet)
    assert found.ratio("FlowPrefill", "DistServe-CP2K") > 1.5  # paper: 1.5-2.3
    assert found.ratio("FlowPrefill", "DistServe-CP8K") > 2.1  # 2.1-3.1


def test_figure_10_order_of_policies() -> None:
    found = fp.compare(POLICIES, MODEL, "rate", 6.0, SIZE, quiet)
    assert found.ratio("S-EDF", "D-EDF") > 1.1
    assert found.ratio("D-EDF", "EDF") > 1.1


def test_figure_11_larger_budgets_raise_throughput() -> None:
    found = {name: flood(BUDGETS[name], SIZE) for name in ("none", "2K", "8K")}
    throughputs = [one.requests_per_s for one in found.values()]
    assert throughputs == sorted(throughputs)
    assert throughputs[-1] > 1.02 * throughputs[0]
    assert found["none"].passes_per_request == 1.0
    assert found["8K"].passes_per_request < 0.7 * found["2K"].passes_per_request


def test_figure_12_operators_block_less_than_layers() -> None:
    operator, layer = (blocking(MODEL, name, 6.0, SIZE) for name in ("operator", "layer"))
    assert operator.mean < 4.5e-3
    assert layer.mean > 3.0 * operator.mean  # paper: 3.5-4.2


@pytest.mark.parametrize("model", fp.MODELS)
def test_figure_12_ratio_of_one_pass(model: str) -> None:
    """Five operators, of which the largest takes half of a layer: between 2 and 5."""
    assert 3.0 < expected_ratio(model, 8192) < 4.2


@pytest.mark.parametrize("rate_rps", [3.0, 9.0])
def test_section_6_4_rounds(rate_rps: float) -> None:
    found = flowprefill_rounds.counts(fp.FLOWPREFILL, rate_rps, SIZE)
    assert found["rounds"] <= 2.0
    assert found["commands"] < found["rounds"]


def test_figure_14_nothing_lost_with_one_objective() -> None:
    size = replace(SIZE, requests=500)
    ours, theirs = (
        fp.load(fp.scenario(system, MODEL, 12.0, size, mix="sharegpt-2k"))
        for system in (fp.FLOWPREFILL, fp.CP2K)
    )
    assert ours.requests_per_s > 0.99 * theirs.requests_per_s
    assert ours.attainment > theirs.attainment


def test_figure_15_chunks_bound_blocking() -> None:
    short, whole = (
        longest_blocking_ms(CHUNKED[name], SIZE) for name in ("chunks of 2K", "whole prompts")
    )
    assert short < 0.3 * whole


def test_figure_15_short_chunks_cost_throughput() -> None:
    short, long = (
        flood(replace(CHUNKED[name], pass_s=fp.PASSES["10 ms a pass"]), SIZE).requests_per_s
        for name in ("chunks of 2K", "chunks of 8K")
    )
    assert long > 1.05 * short


def test_figure_16_colocated() -> None:
    ours, vllm = (
        simulate(COLOCATED[name].scenario(5.0, SIZE)).total
        for name in ("S-EDF, chunks by TBT", "vLLM-CP2K")
    )
    assert ours.ttft_attainment > 1.5 * vllm.ttft_attainment
    assert ours.tbt_attainment > 1.2 * vllm.tbt_attainment  # paper: up to 1.6


@pytest.mark.parametrize("model", fp.MODELS)
def test_whole_chunked_and_batched_passes_agree(model: str) -> None:
    """One profile for all systems: cutting or joining prompts alone must not change its source."""
    profile = fp.operator_profile(fp.MODELS[model], 0.01)
    for tokens in (32, 590, 3000, 8192, 16000):
        alone_s = profile.operators.pass_s(BatchShape(prefills=((tokens, 0),)))
        assert profile.prefill.chunk_s(tokens) == pytest.approx(alone_s, rel=0.04)
    whole, cut = PrefillTimes(profile, 0), PrefillTimes(profile, 2048)
    assert cut.work_s(((8192, 0),), 1) > whole.work_s(((8192, 0),), 1)


def test_command_writes_its_files(tmp_path: Path) -> None:
    found, drawn = tmp_path / "found.json", tmp_path / "drawn.png"
    load_experiment("flowprefill-rounds").run(Console(quiet=True), found, drawn, True)
    document = json.loads(found.read_text("utf-8"))
    assert any(line.startswith("synthetic") for line in document["assumptions"])
    assert document["findings"][0]["paper"] == "at most 2"
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name.startswith("flowprefill")])
def test_every_experiment_is_there(name: str) -> None:
    assert callable(load_experiment(name).run)
