"""Orders of work, one module per policy.

A policy ranks requests: the smaller key goes first, and equal keys go in order of submission. The
live scheduler, the simulator and an instance that packs its own batches all rank by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from millrace.core.live_request import LiveRequest
from millrace.core.priority import d_edf, edf, fcfs, lars, lrs, millrace, s_edf

PriorityKey = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Computes `keys(requests, now_s, instances)`: one key per request, in the order given.

    `instances` is how many prefill instances work on these requests. A `static` policy's keys don't
    depend on time or on other requests, so they are computed only once.
    """

    name: str
    keys: Callable[[Sequence[LiveRequest], float, int], list[PriorityKey]]
    static: bool = False


def _one_by_one(
    name: str, key: Callable[[LiveRequest, float], PriorityKey], *, static: bool = False
) -> Policy:
    def keys(requests: Sequence[LiveRequest], now_s: float, instances: int) -> list[PriorityKey]:
        del instances
        return [key(request, now_s) for request in requests]

    return Policy(name=name, keys=keys, static=static)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            _one_by_one("fcfs", fcfs.key, static=True),
            _one_by_one("edf", edf.key, static=True),
            _one_by_one("d_edf", d_edf.key),
            _one_by_one("s_edf", s_edf.key),
            _one_by_one("lrs", lrs.key),
            _one_by_one("lars", lars.key),
            _one_by_one("lars_deadline", lars.key_by_deadline),
            Policy(name="millrace", keys=millrace.keys),
        )
    }
)
