"""Traffic of several tenants: each has its own stream, and some of them cheat.

A stream depends on the seed and on its tenant alone. So the requests of honest tenants are the same
with and without a cheat beside them, and what the cheat costs them is a difference of two runs.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from millrace.core.arithmetic import ceil_div
from millrace.sim.workload.workload import Draw, PlannedRequest, SloClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant's requests: Poisson arrivals, `rate_rps` in the mean.

    pieces: every prompt is sent as so many requests of equal length at once, each with the
    objectives of the whole.
    """

    name: str
    rate_rps: float
    input_tokens: Draw
    slo: SloClass
    output_tokens: int = 16
    pieces: int = 1


def planned(
    tenants: Sequence[Tenant], duration_s: float, seed: int = 0
) -> Iterator[PlannedRequest]:
    """Returns the requests that arrive within `duration_s`, in order of arrival."""
    merged = heapq.merge(
        *(_arrivals(tenant, duration_s, seed) for tenant in tenants), key=lambda one: one[0]
    )
    for index, (arrival_s, tokens, tenant) in enumerate(merged):
        yield PlannedRequest(
            index=index,
            arrival_s=arrival_s,
            input_tokens=tokens,
            output_tokens=tenant.output_tokens,
            slo=tenant.slo,
            tenant=tenant.name,
        )


def _arrivals(tenant: Tenant, duration_s: float, seed: int) -> Iterator[tuple[float, int, Tenant]]:
    rng = random.Random(f"{seed}/{tenant.name}")
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(tenant.rate_rps)) <= duration_s:
        tokens = ceil_div(tenant.input_tokens(rng), tenant.pieces)
        yield from itertools.repeat((at_s, tokens, tenant), tenant.pieces)
