"""`millrace sim` as a user types it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from millrace import experiments
from millrace.cli.sim.command import register
from millrace.core.errors import ConfigError
from millrace.experiments.joined import common as joined

TRACES = Path(__file__).parents[2] / "data" / "traces"
APP = typer.Typer()
register(APP)
SMALL = ["--prefill", "2", "--decode", "2"]
MIX = [*SMALL, "--mix", "qwen", "--rate", "4", "--requests", "60"]
DATA = ("json", "records")


def millrace(*words):
    return CliRunner().invoke(APP, [str(word) for word in words])


def ran(*words):
    found = millrace(*words)
    assert found.exit_code == 0, found.output
    return found


def refused(*words):
    found = millrace(*words)
    assert found.exit_code == 1
    assert found.stderr.startswith("millrace: ")
    assert found.stderr.count("\n") == 1
    return found.stderr


def test_a_run_writes_all_that_was_asked_for(tmp_path):
    out = {name: tmp_path / name for name in ("json", "plot", "records", "gantt")}
    found = ran("run", *MIX, *(word for name, path in out.items() for word in (f"--{name}", path)))
    assert "60 of 60 requests succeeded" in found.output
    document = json.loads(out["json"].read_text())
    assert document["simulation"] == "run"
    assert document["settings"]["mix"] == "qwen"
    decided = document["scheduler"]
    assert (decided["policy"], decided["preemption"]) == ("millrace", "operator")
    results = document["results"]
    assert results["requests"] == results["total"]["requests"] == 60
    assert set(results["classes"]) <= {"text", "image", "search", "file"}
    assert results["engine"]["requests"] == 60
    records = [json.loads(line) for line in out["records"].read_text().splitlines()]
    assert sorted(record["index"] for record in records) == list(range(60))
    met = sum(record["ttft_s"] <= record["ttft_slo_s"] for record in records)
    assert met == results["total"]["attained"]
    for name in ("plot", "gantt"):
        assert out[name].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("names", "system"),
    [
        (("json", "records", "plot", "gantt", "board"), []),
        (DATA, ["--policy", "s_edf", "--planner", "cdsp", "--preemption", "operator"]),
        (DATA, ["--policy", "s_edf", "--batch-tokens", "2048", "--set", "sim.noise=0.1"]),
        (DATA, ["--failure", "3:p0:5", "--set", "scheduler.tasks_ahead=3"]),
    ],
)
def test_equal_options_give_equal_bytes(tmp_path, monkeypatch, names, system):
    for turn in ("1", "2"):
        (tmp_path / turn).mkdir()
        paths = [(name, tmp_path / turn / f"{name}-{turn}.gz") for name in names]
        outputs = [word for name, path in paths for word in (f"--{name}", path)]
        ran("run", *MIX, "--seed", "3", *system, *outputs)
        monkeypatch.setattr(time, "time", lambda: 7.0)  # files have no wall time
    for name in names:
        one, two = (tmp_path / turn / f"{name}-{turn}.gz" for turn in "12")
        assert one.read_bytes() == two.read_bytes(), name
    ran("run", *MIX, "--seed", "4", *system, "--records", tmp_path / "other")
    assert (tmp_path / "other").read_bytes() != (tmp_path / "1" / "records-1.gz").read_bytes()


@pytest.mark.parametrize(
    "name", sorted(path.name for path in TRACES.glob("*.*") if path.suffix != ".md")
)
def test_every_trace_runs(tmp_path, name):
    rate = ["--rate", "1"] if "lengths" in name else ["--rate-scale", "0.5"]
    out = tmp_path / "out.json"
    ran("run", *SMALL, "--trace", TRACES / name, *rate, "--json", out)
    results = json.loads(out.read_text())["results"]
    assert results["succeeded"] == results["requests"] == 50
    assert 0.0 < results["total"]["attainment"] <= 1.0


def test_mixes_of_long_prompts_run():
    for mix in ("tetris-short", "medha-mix", "mixed"):
        found = ran(
            "run",
            "--prefill",
            "8",
            "--decode",
            "2",
            "--mix",
            mix,
            "--rate",
            "0.2",
            "--requests",
            "20",
            "--planner",
            "cdsp",
            "--set",
            "sim.prefill_kv_tokens=2000000",
        )
        assert "20 of 20 requests succeeded" in found.output


def test_a_pool_grows_under_load(tmp_path):
    out = tmp_path / "out.json"
    ran(
        "run",
        "--prefill",
        "1",
        "--decode",
        "2",
        "--mix",
        "qwen",
        "--rate",
        "12",
        "--requests",
        "1500",
        "--autoscale",
        "prefill:1:6",
        "--set",
        "autoscale.start_s=5",
        "--json",
        out,
    )
    events = json.loads(out.read_text())["results"]["engine"]["scale_events"]
    assert {event["pool"] for event in events} == {"prefill"}
    assert 1 < max(event["instances"] for event in events) <= 6


def test_mixed_instances_run(tmp_path):
    found = ran(
        "run",
        "--prefill",
        "0",
        "--decode",
        "0",
        "--mixed",
        "2",
        "--mix",
        "qwen-colocated",
        "--rate",
        "2",
        "--requests",
        "40",
        "--set",
        "packing.t_target_s=0.1",
    )
    assert "40 of 40 requests succeeded" in found.output


def test_long_contexts_are_spread_as_the_scheduler_is_told(tmp_path):
    out = tmp_path / "out.json"
    ran(
        "run", "--mix", "tetris-short", "--rate", "1", "--requests", "30", "--kvp", "2",
        "--prefill", "2", "--decode", "1", "--failure", "5:k1:2", "--json", out,
        "--set", "scheduler.max_kv_tokens_per_worker=16000", "--set", "sim.kvp_kv_tokens=200000",
    )  # fmt: skip
    engine = json.loads(out.read_text())["results"]["engine"]
    assert engine["kvp_onboardings"] > 5
    assert engine["instance_seconds"]["kvp"] > engine["duration_s"]
    assert engine["instance_failures"] == 1


def test_objectives_of_a_class_can_be_given(tmp_path):
    out = tmp_path / "out.json"
    ran("run", *MIX, "--slo-class", "text:0.001:0", "--json", out)
    classes = json.loads(out.read_text())["results"]["classes"]
    assert classes["text"]["attainment"] == 0.0
    assert classes["search"]["attainment"] > 0.5


def test_a_profile_is_fitted_to_a_table_and_simulated(tmp_path):
    table, profile = tmp_path / "own.csv", tmp_path / "own.json"
    table.write_text("tokens,seconds,sp\n1024,0.2,1\n8192,1.5,1\n1024,0.2,2\n8192,0.9,2\n")
    assert "sp 2: a " in ran("fit", table, "--out", profile).output
    assert "60 of 60 requests succeeded" in ran("run", *MIX, "--profile", profile).output
    assert "--out own.txt" in refused("fit", table, "--out", "own.txt")
    table.write_text("tokens\n1\n")
    assert "line 1" in refused("fit", table, "--out", profile)


def test_compare_makes_the_folder_of_its_boards(tmp_path):
    folder = tmp_path / "new" / "runs"
    ran("compare", "fcfs", "lars", *MIX, "--board", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a.jsonl", "b.jsonl"]
    (tmp_path / "file").touch()
    assert "--board" in refused("compare", "fcfs", "lars", *MIX, "--board", tmp_path / "file")


def test_a_sweep_compares_every_combination(tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    found = ran(
        "sweep", *MIX, "--policy", "fcfs", "--policy", "s_edf", "--preemption", "none",
        "--preemption", "operator", "--tolerance", "0.3", "--at", "2,20", "--jobs", "1",
        "--json", out, "--plot", plot,
    )  # fmt: skip
    names = ["fcfs none", "fcfs operator", "s_edf none", "s_edf operator"]
    assert all(name in found.output for name in names)
    systems = json.loads(out.read_text())["results"]["systems"]
    assert [system["name"] for system in systems] == names
    for system in systems:
        assert system["at_edge"]["total"]["attainment"] >= 0.9
        assert [value for value, _ in system["curve"]] == [2.0, 20.0]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "unit"),
    [
        (MIX, "rate 1/s"),
        ([*SMALL, "--trace", TRACES / "azure2023_conv.csv"], "rate scale"),
        ([*MIX, "--axis", "slo-scale"], "SLO scale"),
    ],
)
def test_a_sweep_has_units(words, unit):
    few = ["--requests", "20", "--tolerance", "0.9", "--at", "1", "--jobs", "1"]
    shown = " ".join(ran("sweep", *words, *few).output.split())
    assert f"system {unit} attained" in shown
    assert f"Attainment by {unit}" in shown


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run"], "--trace and --mix"),
        (["run", "--mix", "qwen"], "--rate"),
        (["run", "--mix", "nope", "--rate", "1"], "--mix 'nope'"),
        (["run", *MIX, "--policy", "nope"], "scheduler.policy is 'nope'"),
        (["run", *MIX, "--profile", "nope"], "profile is 'nope'"),
        (["run", *MIX, "--prefill", "0"], "0 prefill"),
        (["run", *MIX, "--slo-scale", "0"], "--slo-scale 0"),
        (["run", *MIX, "--slo-scale", "inf"], "--slo-scale inf: it must be more than 0 and finite"),
        (["run", *MIX, "--rate", "inf"], "--rate inf: it must be more than 0 and finite"),
        (["run", *MIX, "--spp", "2"], "sim.spp is 2; mixed instances alone have stages"),
        (["run", *MIX, "--set", "packing.t_target_s=1"], "t_target_s=1: it changes nothing"),
        (["run", *MIX, "--set", "autoscale.start_s=1"], "start_s=1: it changes nothing"),
        (["run", *MIX, "--autoscale", "kvp:1:2"], "--autoscale 'kvp:1:2'"),
        (["run", *MIX, "--autoscale", "prefill:3:2"], "max_replicas is 2"),
        (["run", *MIX, "--failure", "soon"], "--failure 'soon'"),
        (["run", *MIX, "--failure", "1:p9"], "'p9'"),
        (["run", *MIX, "--errors", "1"], "write it as AT_S:INSTANCE[:FOR_S[:SHARE]]"),
        (["run", *MIX, "--errors", "1:p0:9:2"], "errors.share is 2.0"),
        (["run", *MIX, "--slow", "1:p0:x"], "write it as AT_S:INSTANCE[:FOR_S[:FACTOR]]"),
        (["run", *MIX, "--slow", "1:d0"], "slow.instance_id is 'd0'"),
        (["run", *MIX, "--set", "noise=1"], "--set 'noise=1'"),
        (["run", *MIX, "--set", "sim.nope=1"], "sim.nope=1"),
        (["run", *MIX, "--set", "sim.kvp_kv_tokens=0"], "kvp_kv_tokens is 0"),
        (["run", *MIX, "--set", "sim.max_batch=many"], "max_batch must be int"),
        (["run", *MIX, "--set", "sim.max_batch=0"], "max_batch is 0"),
        (["run", *MIX, "--set", "scheduler.nope=1"], "scheduler.nope"),
        (["run", *MIX, "--gantt", "g.png", "--gantt-window", "5"], "--gantt-window '5'"),
        (["run", *MIX, "--window", "3:1"], "--window '3:1'"),
        (["run", *MIX, "--long-fraction", "0.1"], "--long-fraction 0.1: --mix medha-mix alone"),
        (["run", *MIX, "--mix", "medha-mix", "--long-fraction", "2"], "--long-fraction 2: it must"),
        (["sweep", *MIX, "--axis", "up"], "--axis 'up'"),
        (["sweep", *MIX, "--goal", "1.5"], "--goal 1.5"),
        (["sweep", *MIX, "--at", "1,x"], "--at '1,x'"),
        (["sweep", *MIX, "--at", "0"], "--at '0'"),
        (["sweep", *MIX, "--no-search"], "--no-search"),
        (["sweep", *MIX, "--plot", "p.png"], "--at"),
        (["profile-rates", "--mix", "qwen", "--arrivals", "1,0"], "--arrivals '1,0'"),
        (["profile-rates", "--mix", "qwen", "--arrivals", ""], "--arrivals ''"),
        (["profile-rates", "--mix", "qwen", "--rates", "0.1,7"], "--rates '0.1,7'"),
        (["paper", "nope"], "'nope'"),
    ],
)  # fmt: skip
def test_bad_input_is_named(tmp_path, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    assert named in refused(*words)


@pytest.mark.parametrize("name", ["millrace-policies", "millrace-systems"])
def test_experiments_of_traces_take_their_folder(monkeypatch, name):
    """As the documentation prints it; a folder was refused."""
    seen = {}

    def cases(folder, quick):
        seen.update(joined_cases(folder, quick))
        raise ConfigError("stops here")

    joined_cases = joined.cases
    monkeypatch.setattr(joined, "cases", cases)
    assert "stops here" in refused("paper", name, "--trace", TRACES, "--quick")
    assert seen["Azure code"].traffic.trace == TRACES / "azure2023_code.csv"
    monkeypatch.setattr(joined, "cases", joined_cases)
    assert "azure2023_code.csv.gz is not in it" in refused("paper", name, "--trace", TRACES.parent)


def test_an_experiment_without_a_picture_says_so(tmp_path):
    picture = tmp_path / "a.png"
    found = ran("paper", "tetris-examples", "--quick", "--plot", picture)
    assert "has no picture" in found.output
    assert not picture.exists()


def test_an_experiment_is_run_by_name(monkeypatch, tmp_path):
    (tmp_path / "made_up_experiment.py").write_text(
        "class measure:\n"
        "    def __init__(self, quick, announce):\n"
        "        self.quick = quick\n"
        "    def publish(self, console, json_path, plot_path):\n"
        "        console.print(f'ran {json_path} {plot_path} {self.quick}')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"table-9": "made_up_experiment"})
    assert "ran a.json None True" in ran("paper", "table-9", "--json", "a.json", "--quick").output
