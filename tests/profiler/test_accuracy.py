"""Predicted against real prefill times of the shipped model, on lengths and histories unseen."""

from __future__ import annotations

import random
from statistics import median

import psutil
import pytest

from millrace.cli import SHIPPED_MODEL
from millrace.core.config import EngineConfig
from millrace.engine.assembly import open_engine
from millrace.profiler.fitting import prefill_latency
from millrace.profiler.measure import measure, usual
from millrace.profiler.workload import Workload

CHUNK = 2048
BUSY_PERCENT = 20  # of all cores


@pytest.mark.slow
def test_unseen_prefills_are_predicted_within_fifteen_percent() -> None:
    if (busy := psutil.cpu_percent(1.0)) > BUSY_PERCENT:
        pytest.skip(f"the machine is busy ({busy:.0f} %): times would mean nothing")
    engine = open_engine(SHIPPED_MODEL, EngineConfig(device="cpu", threads=1))
    workload = Workload(engine, max_chunk_tokens=CHUNK, max_batch=64)
    measured = measure(workload, 20.0)
    latency = prefill_latency(measured)
    draw = random.Random(1)
    errors = []
    for _ in range(30):
        tokens = round(16 * (measured.longest / 16) ** draw.random())
        history = draw.choice([0, draw.randrange(measured.longest - tokens + 1)])
        if (tokens, history) in {(case.tokens, case.history) for case in measured.prefills}:
            continue
        taken_s = usual([workload.prefill(tokens, history).seconds for _ in range(3)])
        errors.append(abs(latency.chunk_s(tokens, history) / taken_s - 1.0))
    workload.close()
    assert median(errors) < 0.15, sorted(errors)
