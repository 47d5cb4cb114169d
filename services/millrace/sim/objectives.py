"""Objectives for requests that bring none, and tighter or looser ones by one scale.

Medha's released code gives a request without an objective the deadline arrival +
max(1.5 x predicted prefill, 0.5 s). The simulator writes it into the request here, and nowhere
else, so that every system under comparison is held to the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from millrace.sim.workload import PlannedRequest, SloClass

DEADLINE_MULTIPLE = 1.5
LEAST_DEADLINE_S = 0.5


def with_objectives(
    requests: Iterable[PlannedRequest], isolated_s: Callable[[int], float], scale: float = 1.0
) -> Iterator[PlannedRequest]:
    """The requests, each with a TTFT objective, all objectives times `scale`.

    `isolated_s(tokens)` predicts the prefill of a prompt alone on the idle cluster, in seconds.
    """
    scaled: dict[SloClass, SloClass] = {}
    for request in requests:
        slo = request.slo
        if slo.ttft_s is None:
            deadline_s = max(DEADLINE_MULTIPLE * isolated_s(request.input_tokens), LEAST_DEADLINE_S)
            yield replace(request, slo=_scaled(replace(slo, ttft_s=deadline_s), scale))
        elif scale == 1.0:
            yield request
        else:
            if slo not in scaled:
                scaled[slo] = _scaled(slo, scale)
            yield replace(request, slo=scaled[slo])


def _scaled(slo: SloClass, scale: float) -> SloClass:
    return replace(
        slo,
        ttft_s=None if slo.ttft_s is None else slo.ttft_s * scale,
        tbt_s=None if slo.tbt_s is None else slo.tbt_s * scale,
    )
