"""Sets objectives for requests that bring none, and scales all objectives.

A request without a TTFT objective gets the machine's default for it, as in Medha's released code:
max(1.5 x the prefill alone, 0.5 s). The simulator writes it into the request, so that attainment is
counted against it, every system in a comparison has the same objective, and it can be scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType

from millrace.core.cost.latency import SpLatency
from millrace.core.scheduler.outcomes.objectives import DEADLINE_FACTOR, LEAST_DEADLINE_S
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.models.mixed_latency import mixed_latency
from millrace.sim.workload.workload import PlannedRequest, SloClass


def isolated_prefill(spec: SimSpec) -> Callable[[int], float]:
    """Returns a predictor of the seconds of a prefill alone on the idle cluster, by its tokens.

    By the profile, on the best group that the prefill pool can form; on mixed instances by one
    instance's chunks and stages (`mixed_latency`).
    """
    if not spec.prefill:
        return mixed_latency(spec).chunk_s
    latency = spec.profile.prefill
    held = {sp: latency.by_sp[sp] for sp in latency.degrees if sp <= spec.prefill}
    return SpLatency(by_sp=MappingProxyType(held)).isolated_s


def with_objectives(
    requests: Iterable[PlannedRequest], isolated_s: Callable[[int], float], scale: float = 1.0
) -> Iterator[PlannedRequest]:
    """Returns the requests, each with a TTFT objective, all objectives times `scale`.

    `isolated_s(tokens)`: see `isolated_prefill`.
    """
    scaled: dict[SloClass, SloClass] = {}
    for request in requests:
        slo = request.slo
        if slo.ttft_s is None:
            alone_s = isolated_s(request.input_tokens)
            slo = _scaled(slo, max(DEADLINE_FACTOR * alone_s, LEAST_DEADLINE_S), scale)
        elif scale == 1.0:
            yield request
            continue
        else:
            if slo not in scaled:
                scaled[slo] = _scaled(slo, slo.ttft_s, scale)
            slo = scaled[slo]
        yield PlannedRequest(  # faster than dataclasses.replace, and once a request
            index=request.index,
            arrival_s=request.arrival_s,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            slo=slo,
            tenant=request.tenant,
        )


def _scaled(slo: SloClass, ttft_s: float, scale: float) -> SloClass:
    return SloClass(
        name=slo.name,
        ttft_s=ttft_s * scale,
        tbt_s=None if slo.tbt_s is None else slo.tbt_s * scale,
        e2e_s=None if slo.e2e_s is None else slo.e2e_s * scale,
        weight=slo.weight,
    )
