"""`millrace bench planner` on small pools: a whole report."""

from __future__ import annotations

import gc
import io
import json

from rich.console import Console

from millrace.bench.planner import run as planner
from millrace.bench.planner.command import command
from millrace.bench.planner.report import draw, print_tables


def test_a_whole_report(tmp_path):
    steps = []
    settings = planner.Settings(max_sp=(8, 16), trials=20, passes=2)
    report = planner.run(
        settings, on_progress=lambda done, total, what: steps.append((done, total))
    )
    assert json.loads(json.dumps(report))["results"] == report["results"]
    assert [(r["model"], r["max_sp"], r["gc"]) for r in report["results"]] == [
        (model, max_sp, state)
        for model in ("a100", "scaling")
        for max_sp in (8, 16)
        for state in ("off", "on")
    ]
    assert steps == [(done, 8) for done in range(9)]
    for result in report["results"]:
        assert 0 < result["avg_us"] <= result["max_us"]
        assert 0 < result["median_avg_us"] <= result["median_max_us"]
        assert result["mean_chunks"] >= 1 and 1 <= result["mean_last_sp"] <= result["max_sp"]
    console = Console(record=True, width=80, file=io.StringIO())
    print_tables(report, console)
    text = console.export_text()
    assert text.count("scaling") == 4 and "86.8" in text
    draw(report, tmp_path / "planner.png")
    assert (tmp_path / "planner.png").read_bytes().startswith(b"\x89PNG")


def test_trials_are_drawn_from_the_seed_and_within_the_settings():
    settings = planner.Settings(trials=50, queue_s=2.0)
    trials = planner.trials_of(settings, 16)
    others = planner.trials_of(planner.Settings(trials=50, seed=1), 16)
    assert trials == planner.trials_of(settings, 16) != others
    for tokens, queue_s in trials:
        assert 4096 <= tokens <= 190 * 1024
        assert len(queue_s) == 16 and 0 <= min(queue_s) <= max(queue_s) <= 2.0


def test_the_collector_is_left_as_it_was():
    assert gc.isenabled()
    planner.run(planner.Settings(max_sp=(8,), trials=2, passes=1))
    assert gc.isenabled()


def test_the_command_writes_both_files(tmp_path, capsys):
    command(trials=1, passes=1, json_path=tmp_path / "p.json", plot=tmp_path / "p.png")
    assert len(json.loads((tmp_path / "p.json").read_text())["results"]) == 20
    assert (tmp_path / "p.png").exists() and "Microseconds" in capsys.readouterr().out
