"""`millrace bench decode`: runs of whole small stacks."""

from __future__ import annotations

import io
import json

import pytest
import typer
from rich.console import Console

from millrace.bench.decode import run as decode
from millrace.bench.decode import served
from millrace.bench.decode.command import command
from millrace.bench.decode.report import print_tables
from millrace.bench.decode.window import Window

TINY = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@pytest.fixture
def generated(monkeypatch):
    """The tokens of the answers. Lengths and window are the test's own: on a slow machine the
    requests never overlap.
    """
    found = []

    def window_of(streams, prompt_tokens):
        found.extend(sum(tokens for _, tokens in events) for events in streams)
        start_s = min(events[0][0] for events in streams)
        return Window(
            start_s=start_s, end_s=start_s + 2.0, tokens=80, context_tokens=[prompt_tokens] * 2
        )

    monkeypatch.setattr(served, "SAMPLE_EVERY_S", 0.02)
    monkeypatch.setattr(served, "length_for", lambda streams, steps: steps)
    monkeypatch.setattr(served, "window_of", window_of)
    return found


SMALL = {"batch": 2, "prompt_tokens": 20, "steps": 40, "rounds": 1, "threads": 1, "model": TINY}


async def test_a_whole_run(generated):
    report = await decode.run(decode.Settings(**SMALL))
    assert generated == [40, 40]
    assert json.loads(json.dumps(report)) == report
    (found,) = report["rounds"]
    assert found["stack_tokens_per_s"] == 40.0 and found["bare_tokens_per_s"] > 0
    assert report["ratio"] == found["stack_tokens_per_s"] / found["bare_tokens_per_s"]
    assert f"ratio {report['ratio']:.3f}" in printed(report)


async def test_stacks_with_and_without_telemetry(generated):
    report = await decode.run(decode.Settings(**SMALL, telemetry=True))
    assert generated == [40] * 4
    assert json.loads(json.dumps(report)) == report
    (on,), (off,) = report["telemetry"]["on"], report["telemetry"]["off"]
    assert min(*on.values(), *off.values()) > 0
    assert report["ratios"] == {name: on[name] / off[name] for name in on}
    assert report["trace_bytes"] > 1000
    assert "decoded tokens/s" in printed(report)


def printed(report) -> str:
    console = Console(record=True, width=160, file=io.StringIO())
    print_tables(report, console)
    return console.export_text()


def test_a_dtype_that_is_not_computed_in():
    with pytest.raises(typer.BadParameter, match="'float16' is not one of"):
        command(dtype="float16")
