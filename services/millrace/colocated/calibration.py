"""Finds an instance's model of mixed batches: from a profile, else from a brief measurement."""

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

#: Budget of the brief measurement; one round takes about 1.5 times as long.
BUDGET_S = 1.0


def mixed_batches(
    engine: Engine, config: EngineConfig, budget_s: float = BUDGET_S
) -> OperatorModel:
    """Loads or measures the operator model of mixed batches.

    Must run before anything else uses the engine: it takes the free pages and gives them back.
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
    assert found is not None  # if a prompt has room, one decode has
    return replace(found, history_factor=_by_flops(found.history_factor))


def _by_flops(factor: Table) -> Table:
    """Raises factors below 1 to 1: history costs no less than its FLOPs; a lower measurement is
    noise."""
    return Table(xs=factor.xs, ys=tuple(max(y, 1.0) for y in factor.ys))
