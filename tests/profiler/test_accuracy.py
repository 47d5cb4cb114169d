"""Predicted against real prefill times of the shipped model, on lengths and histories unseen."""

from __future__ import annotations

import os
import random
import time
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
BUSY = 0.15  # of all cores, by others than this process


def others_s() -> float:
    """CPU seconds that other processes have used so far."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return sum(times) - times.idle - times.iowait - own.user - own.system


@pytest.mark.slow
def test_unseen_prefills_are_predicted_within_fifteen_percent() -> None:
    start_s, before_s = time.monotonic(), others_s()
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
    busy = (others_s() - before_s) / (time.monotonic() - start_s) / (os.cpu_count() or 1)
    if busy > BUSY:
        pytest.skip(f"others used {100 * busy:.0f} % of the cores: times mean nothing")
    assert median(errors) < 0.15, sorted(errors)
