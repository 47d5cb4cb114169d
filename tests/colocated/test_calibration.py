"""The model that an instance predicts mixed batches with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from millrace.colocated.calibration import mixed_batches
from millrace.core.config import EngineConfig
from millrace.core.cost.operators import BatchShape
from millrace.engine.assembly import open_engine, profile_key
from millrace.profiles import load_profile
from millrace.profiles.cache import ProfileCache
from support.tiny_models import model_folder


def test_it_is_the_profile_s_or_measured_briefly(tmp_path: Path) -> None:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        threads=1,
        kv_bytes=1 << 20,
        max_chunk_tokens=128,
        max_batch=4,
        profile_cache=str(tmp_path),
    )
    engine = open_engine(model_folder("llama"), config)
    found = mixed_batches(engine, config, budget_s=0.1)
    engine.pool.check_integrity(expected_used=0)
    alone_s = found.pass_s(BatchShape(decodes=2, decode_context_tokens=200))
    with_chunk = BatchShape(prefills=((128, 512),), decodes=2, decode_context_tokens=200)
    assert 0.0 < alone_s < found.pass_s(with_chunk) < 10.0

    shipped = load_profile("llama3-8b-a100-tp1")
    other = replace(shipped.operators, overhead_s=7.0)
    key = profile_key(engine.folder, config)
    ProfileCache(str(tmp_path)).store(key, replace(shipped, mixed=other))
    assert mixed_batches(engine, config) == other
