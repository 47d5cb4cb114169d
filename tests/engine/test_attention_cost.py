"""Attention after a history is timed to the context's end, in as few layers as suffice."""

from __future__ import annotations

import pytest

from millrace.core.config import EngineConfig
from millrace.engine.assembly import Engine, open_engine
from millrace.engine.attention_cost import attention_s, written_pages
from millrace.engine.calibration import calibrate
from support.tiny_models import model_folder


def open_tiny(family: str) -> Engine:
    config = EngineConfig(device="cpu", dtype="float32", threads=1, kv_bytes=4 << 20)
    return open_engine(model_folder(family), config)


@pytest.mark.parametrize(
    "family, attended", [("llama", 1), ("qwen3-layer-types", 2)], ids=["alike", "windows"]
)
def test_a_pass_is_given_up_once_each_kind_of_layer_has_attended(
    monkeypatch: pytest.MonkeyPatch, family: str, attended: int
) -> None:
    engine = open_tiny(family)
    prefill_batch, seen = engine.runner.prefill_batch, []

    def spy(tasks):
        for boundary in prefill_batch(tasks):
            seen.append(boundary.operator)
            yield boundary

    monkeypatch.setattr(engine.runner, "prefill_batch", spy)
    pages = written_pages(engine, 64, 0)
    history = engine.max_context_tokens - 16  # far more than the pages hold
    assert attention_s(engine, 16, history, pages) > 0.0
    assert seen.count("attn") == attended and seen[-1] == "attn"
    engine.pool.free(pages)
    engine.pool.check_integrity(expected_used=0)


def test_written_pages_are_as_many_as_asked_for_and_the_pool_has() -> None:
    engine = open_tiny("llama")
    layout = engine.layout
    for tokens, least_bytes in ((100, 0), (16, 100_000), (16, 1 << 30)):
        pages = written_pages(engine, tokens, least_bytes)
        wanted = max(
            layout.pages_for(tokens), least_bytes // layout.bytes_per_token // layout.page_tokens
        )
        assert len(pages) == min(wanted, layout.num_pages)
        engine.pool.free(pages)


def test_a_brief_fit_grows_with_the_square_beyond_what_it_measured() -> None:
    """However little time there was, attention at the context's end was timed by itself."""
    engine = open_tiny("llama")
    found = calibrate(engine, max_chunk_tokens=64)
    assert found.c > 0.0 and found.d == pytest.approx(found.c / 2)
    engine.pool.check_integrity(expected_used=0)
