"""Where an instance's predictor of mixed batches comes from: a profile, else a brief measuring."""

from __future__ import annotations

import logging
from dataclasses import replace

from millrace.core.config import EngineConfig
from millrace.core.cost.operators import OperatorModel, Table
from millrace.engine.assembly import Engine
from millrace.instance.latency import profile_of
from millrace.profiler.measure import measure
from millrace.profiler.mixed_fit import mixed_model
from millrace.profiler.workload import Workload
from millrace.profiles import load_profile
from millrace.profiles.degrees import REFERENCE

log = logging.getLogger(__name__)

#: Of the brief measuring, a round of which takes some 1.5 times as long.
BUDGET_S = 1.0


def mixed_batches(
    engine: Engine, config: EngineConfig, budget_s: float = BUDGET_S
) -> OperatorModel:
    """Before anything else uses the engine, whose free pages it takes and gives back.

    Raises ConfigError for a named profile that can't be read.
    """
    profile = profile_of(engine, config)
    if profile is not None:
        return profile.mixed_batches
    log.info("mixed batches: measured briefly; `millrace profile` measures them better")
    workload = Workload(
        engine, max_chunk_tokens=config.max_chunk_tokens, max_batch=config.max_batch
    )
    try:
        measured = measure(workload, budget_s)
    finally:
        workload.close()
    found = mixed_model(measured, engine.layout.num_layers, load_profile(REFERENCE).operators)
    assert found is not None  # one decode has room wherever a prompt has
    return replace(found, history_factor=_by_flops(found.history_factor))


def _by_flops(factor: Table) -> Table:
    """A history costs a chunk no less than by FLOP counting: what was measured once, and says
    otherwise, is noise."""
    return Table(xs=factor.xs, ys=tuple(max(y, 1.0) for y in factor.ys))
