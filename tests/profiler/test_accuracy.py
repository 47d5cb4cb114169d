"""Predicted against real prefill times of the shipped model, on lengths and histories unseen."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import psutil
import pytest

from millrace.bench.predictions.run import busy_processes
from millrace.core.config import EngineConfig
from millrace.core.cost.correction import Corrections, band_of
from millrace.engine.assembly import open_engine
from millrace.profiler.fitting import prefill_latency
from millrace.profiler.measure import measure, usual
from millrace.profiler.workload import Workload
from millrace.shipped import SHIPPED_MODEL

CHUNK = 2048
BUSY = 0.15  # share of all cores, used by other processes
#: Passes of a piece of work on a busy machine: one pass is no longer than a slice of the system's
#: scheduler, and takes 1.1 to 3 times its time alone, whatever is predicted.
PASSES = 12


def others_s() -> float:
    """Returns the CPU seconds that other processes have used so far."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return sum(times) - times.idle - times.iowait - own.user - own.system


@contextmanager
def alone() -> Iterator[None]:
    """Skips the test if other processes were busy during the block."""
    start_s, before_s = time.monotonic(), others_s()
    yield
    busy = (others_s() - before_s) / (time.monotonic() - start_s) / (os.cpu_count() or 1)
    if busy > BUSY:
        pytest.skip(f"others used {100 * busy:.0f} % of the cores: times mean nothing")


@pytest.mark.slow
def test_unseen_prefills_are_predicted_within_fifteen_percent() -> None:
    engine = open_engine(SHIPPED_MODEL, EngineConfig(device="cpu", threads=1))
    workload = Workload(engine, max_chunk_tokens=CHUNK, max_batch=64)
    draw = random.Random(1)
    errors = []
    with alone():
        measured = measure(workload, 20.0)
        latency = prefill_latency(measured)
        for _ in range(30):
            tokens = round(16 * (measured.longest / 16) ** draw.random())
            history = draw.choice([0, draw.randrange(measured.longest - tokens + 1)])
            if (tokens, history) in {(case.tokens, case.history) for case in measured.prefills}:
                continue
            taken_s = usual([workload.prefill(tokens, history).seconds for _ in range(3)])
            errors.append(abs(latency.chunk_s(tokens, history) / taken_s - 1.0))
    workload.close()
    assert median(errors) < 0.15, sorted(errors)


@pytest.mark.slow
def test_online_correction_keeps_up_with_a_loaded_machine() -> None:
    """Other processes use every core: prefill takes about twice the profiled time."""
    engine = open_engine(SHIPPED_MODEL, EngineConfig(device="cpu", threads=1))
    workload = Workload(engine, max_chunk_tokens=CHUNK, max_batch=64)
    with alone():
        measured = measure(workload, 10.0)
    latency, corrections = prefill_latency(measured), Corrections()
    draw, errors = random.Random(1), []
    with busy_processes(os.cpu_count() or 1):
        for _ in range(30):
            tokens = draw.randrange(600, CHUNK)
            modelled_s = PASSES * latency.chunk_s(tokens, 0)
            predicted_s = corrections.seconds("p", band_of(tokens), modelled_s)
            taken_s = sum(workload.prefill(tokens, 0).seconds for _ in range(PASSES))
            errors.append(abs(predicted_s / taken_s - 1.0))
            corrections.observe("p", band_of(tokens), predicted_s=modelled_s, observed_s=taken_s)
    workload.close()
    assert median(errors[10:]) < 0.15, sorted(errors)
    alone_s = latency.chunk_s(CHUNK, 0)
    loaded_s = corrections.seconds("p", band_of(CHUNK), alone_s)
    assert loaded_s > 1.2 * alone_s  # else the test corrects nothing
