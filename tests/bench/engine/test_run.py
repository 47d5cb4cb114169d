"""`millrace bench engine` on a tiny model: a whole report, and refused options."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from types import ModuleType

import pytest
import torch
import typer
from rich.console import Console

from millrace.bench.common.machine_limits import gemm_flops_per_s, read_bytes_per_s
from millrace.bench.common.models import LLAMA_100M
from millrace.bench.common.random_model import write_random_llama
from millrace.bench.engine import run as engine
from millrace.bench.engine.command import command
from millrace.bench.engine.llama_cpp import LlamaCppEngine, write_gguf
from millrace.bench.engine.model_costs import decode_step_bytes, prefill_flops
from millrace.bench.engine.report import draw, print_tables
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
needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None or importlib.util.find_spec("gguf") is None,
    reason="llama-cpp-python and gguf are not installed",
)


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch):
    monkeypatch.setattr(engine, "gemm_flops_per_s", lambda dtype: gemm_flops_per_s(dtype, 64, 1))
    monkeypatch.setattr(engine, "read_bytes_per_s", lambda: read_bytes_per_s(1 << 18, 1))


def settings(**changes) -> engine.Settings:
    small = {
        "against": ["transformers"],
        "prefill_tokens": (20, 90),
        "batches": (1, 3),
        "contexts": (17,),
        "steps": 3,
        "repeats": 2,
        "model": TINY,
    }
    return engine.Settings(**{**small, **changes})


@pytest.mark.parametrize(
    "against",
    [
        ["transformers"],
        ["deterministic", "fast"],
        pytest.param(["llama.cpp", "transformers"], marks=needs_llama_cpp),
    ],
)
def test_a_whole_report(tmp_path, against):
    calls = []
    report = engine.run(
        settings(against=against, threads=1), on_progress=lambda *call: calls.append(call)
    )
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
        rates = result["tokens_per_s"]
        assert list(rates) == ["millrace", *against] and min(rates.values()) > 0
        assert set(result["repetitions"].values()) == {2}
        assert result["ratios"] == {
            other: pytest.approx(rates["millrace"] / rates[other]) for other in against
        }
        assert result["machine_share"] > 0
    assert report["machine"]["threads"] == 1
    assert {call[1] for call in calls} == {8} and [call[0] for call in calls][-1] == 7

    console = Console(record=True, width=120, file=io.StringIO())
    print_tables(report, console)
    text = console.export_text()
    assert text.count("prefill ") == 4 and text.count("decode ") == 4
    draw(report, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_without_time_each_engine_still_runs_once():
    report = engine.run(settings(dtypes=["float32"], budget_s=0.0, steps=2))
    assert {n for result in report["results"] for n in result["repetitions"].values()} == {1}


def test_threads_are_put_back():
    before = torch.get_num_threads()
    report = engine.run(settings(dtypes=["float32"], prefill_tokens=(5,), threads=before + 1))
    assert report["machine"]["threads"] == before + 1
    assert torch.get_num_threads() == before


def test_engines_that_disagree_are_never_compared(tmp_path):
    write_random_llama(tmp_path, TINY)
    ours = engine.MillraceEngine(tmp_path, "float32", 64)
    other = engine.TransformersEngine(tmp_path, "float32")
    prompt = engine.prompt_of(settings(), 30)
    with torch.inference_mode():
        assert engine.check_agreement(ours, other, "float32", prompt) < 1e-4
        other.model.model.layers[1].mlp.down_proj.weight.mul_(300)
        with pytest.raises(MillraceError, match="float32 logits differ"):
            engine.check_agreement(ours, other, "float32", prompt)


@pytest.mark.parametrize("missing", ["gguf", "llama_cpp"])
def test_a_missing_engine_is_named_before_anything_is_measured(monkeypatch, missing):
    for name in ("gguf", "llama_cpp"):
        here = None if name == missing else ModuleType(name)
        monkeypatch.setitem(sys.modules, name, here)
    progress = []
    with pytest.raises(MillraceError, match=rf"{missing}.*--against transformers"):
        engine.run(settings(against=["llama.cpp"]), on_progress=lambda *call: progress.append(call))
    assert not progress


@needs_llama_cpp
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.05)])
@pytest.mark.parametrize("tied", [True, False])
def test_llama_cpp_runs_the_same_model(tmp_path, dtype, tolerance, tied):
    write_random_llama(tmp_path, {**TINY, "hidden_size": 96, "tie_word_embeddings": tied})
    write_gguf(tmp_path, tmp_path / "model.gguf", dtype)
    ours = engine.MillraceEngine(tmp_path, dtype, 128)
    other = LlamaCppEngine(tmp_path / "model.gguf", threads=1)
    try:
        prompt = engine.prompt_of(settings(), 40)
        with torch.inference_mode():
            wanted = ours.prefill(prompt).float()
            torch.testing.assert_close(other.prefill(prompt), wanted, atol=tolerance, rtol=0)

            # Decode on a filled context continues at its end, in each sequence.
            torch.manual_seed(1)
            step = other.start_decode(3, 40)
            torch.manual_seed(1)
            context = torch.randint(TINY["vocab_size"], (40,))
            for _ in range(2):
                chosen = step(torch.tensor([1, 2, 3]))
                for token, found in zip((1, 2, 3), chosen, strict=True):
                    logits = ours.prefill(torch.cat([context, torch.tensor([token])]))
                    assert logits.max() - logits[found] <= tolerance
                step = other.start_decode(3, 40)
    finally:
        other.close()


def test_llama_cpp_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    write_random_llama(tmp_path, TINY)
    with pytest.raises(MillraceError, match="pip install llama-cpp-python"):
        write_gguf(tmp_path, tmp_path / "model.gguf", "float32")


def test_costs_of_a_model_counted_by_hand():
    model = {**TINY, "num_hidden_layers": 1, "vocab_size": 10}
    qkv, rest = 48 * (48 + 2 * 16), 48 * 48 + 3 * 48 * 64
    # Of one layer, only q, k and v of the first two positions, and all of the last position.
    assert prefill_flops(model, 3) == 2 * (3 * qkv + rest + 480) + 4 * 48 * 3
    assert decode_step_bytes(model, 2, 7, 4) == 4 * (qkv + rest + 480 + 2 * 16 * 14)
    # The usual rule of thumb, two FLOPs per parameter and token, for a short prompt of a real
    # model.
    assert prefill_flops(LLAMA_100M, 512) == pytest.approx(2 * 75.5e6 * 512, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"against": "transformers,other"},
            "'other' is not one of transformers, llama.cpp, deterministic, fast",
        ),
        ({"dtypes": "float16"}, "'float16' is not one of"),
        ({"prefill_tokens": "512,x"}, "--prefill '512,x'"),
        ({"contexts": "0"}, "--contexts '0'"),
    ],
)
def test_options_that_make_no_sense(arguments, message):
    with pytest.raises(typer.BadParameter, match=message):
        command(**arguments)
