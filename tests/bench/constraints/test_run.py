"""`millrace bench constraints` on a small model: a whole report, and the tokenizer's vocabulary."""

from __future__ import annotations

import io
import json

from rich.console import Console
from tokenizers import Tokenizer

from millrace.bench.constraints import run as constraints
from millrace.bench.constraints.command import KINDS, Settings
from millrace.bench.constraints.report import print_tables

MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
SETTINGS = Settings(
    batch=2, context_tokens=8, steps=12, vocabulary=1024, dtype="float32", threads=1, model=MODEL
)


def test_a_whole_report() -> None:
    steps = []
    report = constraints.run(SETTINGS, on_progress=lambda done, total, what: steps.append(done))
    assert steps == list(range(len(KINDS) + 1))
    assert json.loads(json.dumps(report))["results"] == report["results"]
    for kind, found in zip(KINDS, report["results"], strict=True):
        assert found["kind"] == kind
        assert 0.0 < found["mask_us"]["p50"] <= found["mask_us"]["p99"]
        assert 0.0 <= found["forced_share"] <= 1.0
        ratio = found["constrained_step_ms"] / found["free_step_ms"]
        assert found["cost_share"] == ratio - 1.0
    console = Console(record=True, width=120, file=io.StringIO())
    print_tables(report, console)
    assert all(kind in console.export_text(clear=False) for kind in KINDS)


def test_the_vocabulary_has_every_byte_and_no_token_twice(tmp_path) -> None:
    constraints.write_tokenizer(tmp_path, 5000)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == len(tokenizer.get_vocab()) == 5000
    text = 'naïve {"a": 1} 東京'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
