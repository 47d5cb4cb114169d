"""Measures a profile of the model on this machine within the run, for the simulator."""

from __future__ import annotations

from millrace.bench.hol.systems import WHOLE_TOKENS
from millrace.core.cost.profile import Profile
from millrace.engine.assembly import Engine
from millrace.profiler.fitting import Subject, build_profile
from millrace.profiler.measure import measure
from millrace.profiler.workload import Workload


def measure_profile(engine: Engine, budget_s: float, threads: int) -> Profile:
    """Measures whole prompts for about `budget_s` seconds: each is one pass of the prompt's
    length.
    """
    workload = Workload(engine, max_chunk_tokens=WHOLE_TOKENS, max_batch=1)
    try:
        measured = measure(workload, budget_s)
    finally:
        workload.close()
    layout = engine.layout
    subject = Subject(
        model=engine.folder.name,
        device=engine.device.type,
        dtype=layout.dtype,
        threads=threads,
        layers=layout.num_layers,
        kv_bytes_per_token=layout.bytes_per_token,
        max_chunk_tokens=WHOLE_TOKENS,
    )
    return build_profile(subject, measured)
