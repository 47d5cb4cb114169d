"""`millrace bench decode`: its counts, and one run of a whole small stack."""

from __future__ import annotations

import io
import json

import pytest
import typer
from rich.console import Console

from millrace.bench.decode import run as decode
from millrace.bench.decode.command import command
from millrace.bench.decode.report import print_tables
from millrace.core.errors import MillraceError

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


def test_only_the_time_in_which_all_decode_counts():
    first = [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 2), (5.0, 1)]
    second = [(2.5, 1), (3.0, 1), (4.0, 2), (5.5, 1)]
    window = decode.window_of([first, second], prompt_tokens=10)
    assert (window.start_s, window.end_s, window.tokens) == (3.0, 5.0, 5)
    assert window.context_tokens == [13, 12]
    assert window.tokens_per_s == 2.5


@pytest.mark.parametrize("late", [[(9.0, 1), (9.5, 1)], [(2.0, 1)]])
def test_requests_that_never_decode_together_are_refused(late):
    with pytest.raises(MillraceError, match="raise --steps"):
        decode.window_of([[(1.0, 1), (2.0, 1), (3.0, 1)], late], prompt_tokens=10)


def test_costs_are_those_within_the_window():
    window = decode.Window(start_s=1.0, end_s=4.0, tokens=8, context_tokens=[1])
    samples = [
        decode.Sample(at_s=at, steps=steps, step_s=step_s, cpu_s={"proxy": cpu})
        for at, steps, step_s, cpu in ((0.5, 0, 0, 0), (1.5, 100, 1.0, 3.0), (3.5, 300, 2.6, 3.5))
    ]
    costs = decode.costs_of(samples, window)
    assert costs.step_ms == pytest.approx(8.0) and costs.between_steps_ms == pytest.approx(2.0)
    assert costs.cpu_ms == {"proxy": pytest.approx(2.5)}
    assert decode.costs_of(samples[:2], window) is None


def test_answers_are_longer_by_what_the_last_prompt_takes():
    first = [(1.0, 1), (1.5, 5)]  # 0.1 s per token
    last = [(3.5, 1), (4.1, 2), (4.5, 3)]  # 0.2 s
    assert decode.length_for([first, last], 100) == 133  # 1.3 times 25 steps
    assert decode.length_for([first], 100) == 100
    at_once = [(1.0, 16)], [(1.00105, 16)]  # no step is quicker than 0.1 ms
    assert decode.length_for(at_once, 100) == 114


async def test_a_whole_run(monkeypatch):
    """Lengths and window are the test's own: on a slow machine the requests never overlap."""
    generated = []

    def window_of(streams, prompt_tokens):
        generated.extend(sum(tokens for _, tokens in events) for events in streams)
        start_s = min(events[0][0] for events in streams)
        return decode.Window(
            start_s=start_s, end_s=start_s + 2.0, tokens=80, context_tokens=[prompt_tokens] * 2
        )

    monkeypatch.setattr(decode, "SAMPLE_EVERY_S", 0.02)
    monkeypatch.setattr(decode, "length_for", lambda streams, steps: steps)
    monkeypatch.setattr(decode, "window_of", window_of)
    settings = decode.Settings(batch=2, prompt_tokens=20, steps=40, rounds=1, threads=1, model=TINY)
    report = await decode.run(settings)
    assert generated == [40, 40]
    assert json.loads(json.dumps(report)) == report
    (found,) = report["rounds"]
    assert found["stack_tokens_per_s"] == 40.0 and found["bare_tokens_per_s"] > 0
    assert report["ratio"] == found["stack_tokens_per_s"] / found["bare_tokens_per_s"]
    console = Console(record=True, width=160, file=io.StringIO())
    print_tables(report, console)
    assert f"ratio {report['ratio']:.3f}" in console.export_text()


def test_a_dtype_that_is_not_computed_in():
    with pytest.raises(typer.BadParameter, match="'float16' is not one of"):
        command(dtype="float16")
