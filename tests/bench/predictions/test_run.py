"""`millrace bench predictions`: its counts, and a whole run of a few prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from millrace.bench.predictions.command import command
from millrace.bench.predictions.run import Asked, Settings, summary


def settings(**changes) -> Settings:
    return Settings(
        **{
            "lengths": (16, 1024, 65_536),
            "repeats": 4,
            "long_tokens": 2048,
            "busy": 0,
            "prefill": 1,
            "threads": 1,
            "budget_s": 1.0,
            **changes,
        }
    )


def test_long_prompts_come_less_often_and_all_in_a_mixed_order() -> None:
    order = settings().order()
    assert sorted(order) == [16] * 4 + [1024] * 2 + [65_536]
    assert order != sorted(order) and order == settings().order()


def test_errors_are_relative_to_the_real_time() -> None:
    found = summary([Asked(16, 1.0, 2.0), Asked(16, 3.0, 2.0), Asked(32, 4.0, 1.0)])
    assert found["all"]["median_error"] == 0.5 and found["all"]["p95_error"] == 3.0
    assert found["lengths"]["16"] == {
        "prompts": 2,
        "median_error": 0.5,
        "p95_error": 0.5,
        "predicted_s": 2.0,
        "real_s": 2.0,
    }
    assert found["prompts"][0] == {"tokens": 16, "predicted_s": 1.0, "real_s": 2.0}


def test_a_whole_run_beside_a_busy_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plot = tmp_path / "found.json", tmp_path / "found.png"
    command(lengths="16,128", repeats=2, busy=1, budget_s=0.2, json_path=path, plot=plot)
    shown = capsys.readouterr().out
    document = json.loads(path.read_text())
    for name in ("idle", "busy"):
        assert f"{name}: " in shown and document[name]["all"]["prompts"] == 4
        assert all(one["predicted_s"] > 0.0 for one in document[name]["prompts"])
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("lengths", ["", "0", "16,x"])
def test_lengths_that_make_no_sense_are_named(lengths: str) -> None:
    with pytest.raises(typer.BadParameter, match="--lengths"):
        command(lengths=lengths)
