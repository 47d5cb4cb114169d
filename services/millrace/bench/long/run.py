"""Runs the measurements of `millrace bench long` in order and makes the document."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from millrace.bench.common.machine_limits import describe_machine
from millrace.bench.common.options import Announce
from millrace.bench.common.random_model import write_random_model
from millrace.bench.long import kvp as long_kvp
from millrace.bench.long import mixed as long_mixed
from millrace.bench.long import spp as long_spp
from millrace.bench.long.command import MIXED_PARTS, Settings
from millrace.bench.long.mixed import Document
from millrace.bench.long.model import LONG_LLAMA_27M, kv_bytes
from millrace.core.config import EngineConfig
from millrace.core.cost.operators import OperatorModel
from millrace.engine.assembly import Engine, open_engine
from millrace.profiler.measure import Measured, measure
from millrace.profiler.mixed_fit import mixed_model
from millrace.profiler.workload import Workload
from millrace.profiles import load_profile
from millrace.profiles.degrees import REFERENCE

MAX_CHUNK_TOKENS = 2048


async def run(settings: Settings, announce: Announce = lambda what: None) -> Document:
    """Measures and returns the document. Raises MillraceError for impossible settings."""
    begun_s = time.perf_counter()
    document: Document = {"benchmark": "long", "settings": asdict(settings)}
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder), LONG_LLAMA_27M)
        if set(settings.parts) & set(MIXED_PARTS):
            document |= await asyncio.to_thread(_mixed, model, settings, announce)
        if "spp" in settings.parts:
            document["spp"] = await asyncio.to_thread(
                long_spp.stages,
                model,
                dtype=settings.dtype,
                degrees=settings.stages,
                prompt_tokens=settings.stage_prompt_tokens,
                chunk_tokens=settings.stage_chunk_tokens,
                repeats=settings.stage_repeats,
                announce=announce,
            )
        if "kvp" in settings.parts:
            document["kvp"] = await asyncio.to_thread(_kvp, model, settings, announce)
    document["machine"] = describe_machine()
    document["took_s"] = time.perf_counter() - begun_s
    return document


def _mixed(model: Path, settings: Settings, announce: Announce) -> Document:
    config = EngineConfig(
        device="cpu",
        dtype=settings.dtype,
        threads=settings.threads,
        kv_bytes=kv_bytes(2 * settings.prompt_tokens, settings.dtype),
        max_chunk_tokens=MAX_CHUNK_TOKENS,
    )
    engine = open_engine(model, config)
    workload = Workload(
        engine,
        max_chunk_tokens=MAX_CHUNK_TOKENS,
        max_batch=config.max_batch,
        # The prompt, and the decodes beside it.
        max_tokens=settings.prompt_tokens * 3 // 2,
    )
    found: Document = {}
    try:
        if set(settings.parts) & {"predictor", "chunking"}:
            predicted, measured = _model(engine, workload, settings, announce)
            found |= _predicted(workload, predicted, measured, settings, announce)
        if "batching" in settings.parts:
            found["batching"] = long_mixed.batching(
                workload,
                chunk_tokens=settings.chunk_tokens,
                histories=long_mixed.histories_of(
                    settings.prompt_tokens, settings.chunk_tokens, settings.histories
                ),
                contexts=(settings.short_context_tokens,) * settings.short_decodes,
                rounds=settings.batching_rounds,
                announce=announce,
            )
    finally:
        workload.close()
        engine.close()
    return found


def _model(
    engine: Engine, workload: Workload, settings: Settings, announce: Announce
) -> tuple[OperatorModel, Measured]:
    """Fits the model as `millrace profile` does."""
    announce("measuring a profile")
    measured = measure(workload, settings.profile_s)
    found = mixed_model(measured, engine.layout.num_layers, load_profile(REFERENCE).operators)
    assert found is not None  # there is room for decodes
    return found, measured


def _predicted(
    workload: Workload,
    model: OperatorModel,
    measured: Measured,
    settings: Settings,
    announce: Announce,
) -> Document:
    found: Document = {}
    if "predictor" in settings.parts:
        batches = long_mixed.random_batches(
            settings.batches,
            most_tokens=MAX_CHUNK_TOKENS // 2,
            most_history=settings.prompt_tokens // 2,
            most_decodes=settings.most_decodes,
        )
        found["predictor"] = long_mixed.predictor(
            workload, model, measured, batches, settings.rounds, announce
        )
    if "chunking" in settings.parts:
        found["chunking"] = long_mixed.chunking(
            workload,
            model,
            prompt_tokens=settings.prompt_tokens,
            static=settings.static,
            contexts=(settings.context_tokens,) * settings.decodes,
            announce=announce,
        )
    return found


def _kvp(model: Path, settings: Settings, announce: Announce) -> Document:
    degree = max(settings.degrees)
    longest = settings.most_tokens * degree
    steps = settings.growth_steps
    grown = [longest * (number + 1) // steps for number in range(steps)]
    announce("kvp: starting workers")
    context = max(longest, *settings.contexts)
    with long_kvp.kv_owner(model, dtype=settings.dtype, context=context, degree=degree) as at:
        return {
            "token": long_kvp.token_times(
                at, settings.contexts, settings.degrees, settings.token_repeats, announce
            ),
            "growth": long_kvp.growth(
                at,
                grown,
                settings.most_tokens,
                settings.growth_chunk_tokens,
                settings.growth_repeats,
                announce,
            ),
            "most_tokens": settings.most_tokens,
            "chunk_tokens": settings.growth_chunk_tokens,
        }
