"""Stages as processes: rows between them over the transport, one engine to whoever uses it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from millrace.bench.random_model import write_random_llama
from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.engine.assembly import open_engine
from millrace.engine.fallen import EngineFallen
from millrace.engine.model_runner import PrefillTask
from millrace.worker.stages import open_staged_engine
from support.staged import FIVE_LAYERS
from support.tiny_engine import Request, decode, prefill
from support.tiny_models import prompt

LAYERS = FIVE_LAYERS["num_hidden_layers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    write_random_llama(folder, FIVE_LAYERS)
    return folder


def settings(stages: int, **others: object) -> EngineConfig:
    return EngineConfig(
        device="cpu", stages=stages, kv_bytes=1 << 22, max_chunk_tokens=64, threads=1, **others
    )


def test_three_processes_are_one_engine_until_one_dies(folder) -> None:
    torch.set_num_threads(1)
    wanted = open_engine(folder, settings(1))
    engine = open_staged_engine(str(folder), settings(3), "127.0.0.1")
    try:
        assert engine.layout == wanted.layout
        assert engine.max_context_tokens == wanted.max_context_tokens
        requests = [Request(e.runner, prompt(150), room=4) for e in (engine, wanted)]
        logits = [
            prefill(e.runner, r, (60, 100)) for e, r in zip((engine, wanted), requests, strict=True)
        ]
        assert torch.equal(*logits)
        for _ in range(3):
            for request in requests:
                request.tokens.append(7)
            steps = [decode(e.runner, [r]) for e, r in zip((engine, wanted), requests, strict=True)]
            assert torch.equal(*steps)
        kv = [e.storage[:, r.pages] for e, r in zip((engine, wanted), requests, strict=True)]
        assert torch.equal(*kv)  # of all layers, as whoever sends them sees them
        children = [p.pid for p in engine.runner._stages._processes]
        os.kill(children[0], signal.SIGKILL)
        task: PrefillTask = requests[0].task(0, 50)
        begun_s = time.monotonic()
        with pytest.raises(EngineFallen, match="stage 1 died, killed by SIGKILL"):
            for _ in engine.runner.prefill(task):
                pass
        assert time.monotonic() - begun_s < 30  # found out by its end, not by a timeout
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("stages", "others", "message"),
    [
        (LAYERS + 1, {}, f"engine.stages is {LAYERS + 1}; the model's {LAYERS} layers"),
        (2, {"tensor_parallel": 2}, "engine.stages is 2 and engine.tensor_parallel 2"),
    ],
)
def test_what_cannot_be_staged_is_refused_by_name(folder, stages, others, message) -> None:
    with pytest.raises(ConfigError, match=message):
        open_staged_engine(str(folder), settings(stages, **others), "127.0.0.1")
