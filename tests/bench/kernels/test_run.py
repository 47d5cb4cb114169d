"""`millrace bench kernels` on tiny shapes: a whole report, and refused options."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
import typer
from rich.console import Console

from millrace.bench.kernels import run as kernels
from millrace.bench.kernels.case import Case, Sides, Sizes
from millrace.bench.kernels.command import KERNELS, command
from millrace.bench.kernels.report import draw, print_tables
from millrace.core.errors import MillraceError

SETTINGS = kernels.Settings
TINY = Sizes(
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=32,
    prefill_rows=(20,),
    histories=(0, 45),
    batches=(1, 3),
    contexts=(50,),
    ring_tokens=32,
    rows=(3,),
    hidden=48,
    intermediate=64,
    linear_rows=(1, 9),
    linear_shapes=((48, 64),),
    fused_rows=(2,),
    experts=4,
    expert_width=32,
    vocab=300,
    cold_bytes=20_000,
)


def settings(**changes) -> kernels.Settings:
    small = {
        "sizes": TINY,
        "budget_s": 0.002,
        "peak_side": 64,
        "read_bytes": 4096,
        "chunk_rows": (4, 32),
        "chunk_history": 100,
    }
    return SETTINGS(**{**small, **changes})


def test_a_whole_report(tmp_path):
    calls = []
    report = kernels.run(settings(threads=1), on_progress=lambda *call: calls.append(call))
    assert json.loads(json.dumps(report))["results"] == report["results"]
    assert {result["kernel"] for result in report["results"]} == set(KERNELS)
    for result in report["results"]:
        assert result["ours_s"] > 0 and result["other_s"] > 0
        assert result["ratio"] == pytest.approx(result["ours"] / result["other"])
        assert result["ratio"] == pytest.approx(result["ours_share"] / result["other_share"])
        assert result["unit"] in ("GFLOP/s", "GB/s")
        assert (result["against"] == "pieces") == result["kernel"].startswith("after_")
    assert [chunks["dtype"] for chunks in report["chunks"]] == ["float32", "bfloat16"]
    for chunks in report["chunks"]:
        small_us, large_us = chunks["us_per_token"]
        assert chunks["ratio"] == pytest.approx(small_us / large_us)
    assert report["machine"]["threads"] == 1
    total = 1 + len(report["results"]) + 2
    assert [call[:2] for call in calls] == [(done, total) for done in range(total + 1)]

    console = Console(record=True, width=80, file=io.StringIO())
    print_tables(report, console)
    text = console.export_text()
    assert text.count("fp32") + text.count("bf16") == len(report["results"]) + 2
    assert text.count("attention after 100") == 2 and "…" not in text
    draw(report, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_only_what_is_named_runs(tmp_path):
    report = kernels.run(settings(names=["merge"], dtypes=["bfloat16"]))
    assert [(r["kernel"], r["dtype"]) for r in report["results"]] == [("merge", "bfloat16")]
    assert report["chunks"] == []
    report = kernels.run(settings(names=["chunks"], dtypes=["float32"]))
    assert report["results"] == [] and len(report["chunks"]) == 1
    print_tables(report, Console(file=io.StringIO()))
    draw(report, tmp_path / "none.png")


@pytest.mark.parametrize(
    ("flops", "moved_bytes", "unit", "rate", "share"),
    [(2e9, 1e9, "GFLOP/s", 2.0, 0.2), (2e9, 3e9, "GB/s", 3.0, 0.3)],
)
def test_a_share_is_of_the_bound_that_is_longer(monkeypatch, flops, moved_bytes, unit, rate, share):
    monkeypatch.setattr(kernels, "measure", lambda *_: [[0.5, 1.0, 9.0], [2.0] * 3])
    one = torch.ones(1)
    case = Case(
        kernel="linear",
        shape="",
        dtype="float32",
        flops=flops,
        moved_bytes=moved_bytes,
        make=lambda: Sides(lambda: one, lambda: one),
    )
    peaks = kernels.Peaks(flops_per_s={"float32": 1e10}, bytes_per_s=1e10)
    result = kernels.compare(case, peaks, 1.0)
    assert (result.unit, result.ratio) == (unit, 2.0)
    assert (result.ours, result.other) == pytest.approx((rate, rate / 2))
    assert (result.ours_share, result.other_share) == pytest.approx((share, share / 2))


def test_sides_that_disagree_are_never_compared():
    first = next(case for case in kernels.cases_of(settings()) if case.kernel == "silu_mul")
    sides = first.make()
    wrong = replace(first, make=lambda: Sides(sides.ours, lambda: sides.other() * 1.01))
    peaks = kernels.Peaks(flops_per_s={"float32": 1e10}, bytes_per_s=1e10)
    with pytest.raises(MillraceError, match=r"silu_mul float32 .3 rows of 64. differs by"):
        kernels.compare(wrong, peaks, 0.001)


@pytest.mark.parametrize(("budget_s", "samples", "ran"), [(2.0, 1, 1), (2.5, 1, 3), (12.0, 2, 4)])
def test_long_calls_are_timed_once(monkeypatch, budget_s, samples, ran):
    now = [0.0]
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: now[0])
    calls, results = [], []

    def call(seconds):
        now[0] += seconds
        calls.append(seconds)
        return seconds

    found = kernels.measure([lambda: call(4.0), lambda: call(5.0)], budget_s, results.extend)
    assert found == [[4.0] * samples, [5.0] * samples] and results == [4.0, 5.0]
    assert calls.count(4.0) == ran


def test_threads_are_put_back():
    before = torch.get_num_threads()
    report = kernels.run(settings(names=["silu_mul"], threads=before + 1))
    assert report["machine"]["threads"] == before + 1
    assert torch.get_num_threads() == before


def test_the_command_writes_both_files(tmp_path, capsys, monkeypatch):
    run = kernels.run

    def small(asked, **progress):
        chosen = {name: getattr(asked, name) for name in ("names", "dtypes", "budget_s")}
        return run(settings(**chosen), **progress)

    monkeypatch.setattr(kernels, "run", small)
    paths = {"json_path": tmp_path / "k.json", "plot": tmp_path / "k.png"}
    command(names="merge, silu_mul", dtypes="float32", budget_s=0.001, **paths)
    report = json.loads((tmp_path / "k.json").read_text())
    assert [result["kernel"] for result in report["results"]] == ["merge", "silu_mul"]
    assert (tmp_path / "k.png").exists() and "silu_mul" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [{"names": "linear,other"}, {"dtypes": "other"}])
def test_options_that_make_no_sense(arguments):
    with pytest.raises(typer.BadParameter, match="'other' is not one of"):
        command(**arguments)
