"""A moment of a pool: its load, and the size that the targets of autoscaling ask for then.

The load is that which autoscaling reads (`core.autoscale`); sizes are without windows and limits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from millrace.core.autoscale.load import FleetLoad, PoolLoad
from millrace.core.autoscale.rules import (
    AutoscaleConfig,
    DecodeTargets,
    PrefillTargets,
    Targets,
)

_TARGETS: Final[Mapping[str, tuple[Targets, ...]]] = {
    "prefill": (PrefillTargets(),),
    "decode": (DecodeTargets(),),
    "mixed": (PrefillTargets(), DecodeTargets()),
}
#: No limit of a size: what is asked for is the question.
_MOST: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSample:
    """One pool at one moment.

    `in_use` is the share of its capacity: of prefill the work that arrives, of decode the KV, of
    mixed instances the higher; None: not measured. `wanted` is the size that the targets ask for,
    most because of `reason`; None: nothing was measured.
    """

    role: str
    instances: int
    in_use: float | None = None
    wanted: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSample:
    """A sample and its time, Unix s."""

    at_s: float
    sample: PoolSample

    def encoded(self) -> bytes:
        """Returns what `decode_sample` reads."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def decode_sample(text: bytes) -> TimedSample:
    """Raises ValueError, KeyError or TypeError for a text of another shape."""
    fields = json.loads(text)
    return TimedSample(at_s=fields["at_s"], sample=PoolSample(**fields["sample"]))


def samples_of(load: FleetLoad, now_s: float) -> list[PoolSample]:
    """Returns a sample of each pool with ready instances."""
    pools = ((load.pools.get(role), targets) for role, targets in _TARGETS.items())
    return [_sample(pool, targets, now_s) for pool, targets in pools if pool and pool.ready]


def _sample(pool: PoolLoad, targets: tuple[Targets, ...], now_s: float) -> PoolSample:
    config = AutoscaleConfig(targets=targets, max_replicas=_MOST)
    metrics = pool.metrics(sampled_s=now_s, parked_requests=0, size=pool.ready)
    wishes = [wish for one in targets for wish in one.wishes(metrics, config)]
    most = max(wishes, key=lambda wish: wish.replicas, default=None)
    arriving = None if pool.arriving is None else pool.arriving / pool.ready
    measured = [share for share in (arriving, pool.kv_utilisation) if share is not None]
    return PoolSample(
        role=pool.role,
        instances=pool.ready,
        in_use=max(measured, default=None),
        wanted=None if most is None else most.replicas,
        reason="" if most is None else most.reason,
    )
