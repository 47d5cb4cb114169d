"""`millrace bench engine` on a tiny model: a whole report, and what it refuses."""

from __future__ import annotations

import io
import json

import pytest
import torch
import typer
from rich.console import Console

from millrace.bench import engine
from millrace.core.errors import MillraceError

TINY = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def settings(**changes) -> engine.Settings:
    small = {
        "prefill_tokens": (20, 90),
        "batches": (1, 3),
        "contexts": (17,),
        "steps": 3,
        "repeats": 2,
        "model": TINY,
    }
    return engine.Settings(**{**small, **changes})


def test_a_whole_report(tmp_path):
    calls = []
    report = engine.run(settings(), threads=1, on_progress=lambda *call: calls.append(call))
    assert json.loads(json.dumps(report)) == report
    seen = [tuple(result["case"].values()) for result in report["results"]]
    assert seen == [
        (phase, dtype, batch, tokens)
        for dtype in ("float32", "bfloat16")
        for phase, batch, tokens in (
            ("prefill", 1, 20),
            ("prefill", 1, 90),
            ("decode", 1, 17),
            ("decode", 3, 17),
        )
    ]
    for result in report["results"]:
        rates = result["millrace_tokens_per_s"], result["other_tokens_per_s"]
        assert min(rates) > 0 and result["ratio"] == pytest.approx(rates[0] / rates[1])
    assert report["machine"]["threads"] == 1
    assert [call[0] for call in calls] == list(range(16)) and {call[1] for call in calls} == {16}

    console = Console(record=True, width=100, file=io.StringIO())
    console.print(engine.as_table(report))
    text = console.export_text()
    assert text.count("prefill") == 4 and text.count("decode") == 4
    engine.draw(report, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_threads_are_put_back():
    before = torch.get_num_threads()
    report = engine.run(settings(dtypes=["float32"], prefill_tokens=(5,)), threads=before + 1)
    assert report["machine"]["threads"] == before + 1
    assert torch.get_num_threads() == before


def test_engines_that_disagree_are_never_compared(tmp_path):
    engine.make_model(tmp_path, TINY)
    ours = engine.MillraceEngine(tmp_path, "float32", 64)
    other = engine.TransformersEngine(tmp_path, "float32")
    prompt = settings().prompt(30)
    with torch.inference_mode():
        assert engine.check_agreement(ours, other, "float32", prompt) < 1e-4
        other._model.model.layers[1].mlp.down_proj.weight.mul_(3)
        with pytest.raises(MillraceError, match="float32 logits differ"):
            engine.check_agreement(ours, other, "float32", prompt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"against": "other"}, "only transformers"),
        ({"dtypes": "float16"}, "'float16' is none of"),
        ({"prefill": "512,x"}, "no list of whole numbers"),
        ({"contexts": "0"}, "at least 1"),
    ],
)
def test_options_that_make_no_sense(arguments, message):
    with pytest.raises(typer.BadParameter, match=message):
        engine.command(**arguments)
