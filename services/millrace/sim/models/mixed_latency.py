"""The time of a prompt alone on a mixed instance: Medha's Algorithm 3 as a latency model.

The work w of slack and of deadlines is that of the chunks that the instance will run (appendix
A.3), about 40 % more than one uncut pass at 1 M tokens. KVP workers are not counted.
"""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType

from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.cost.operators import OperatorModel
from millrace.core.cost.prefill_times import ChunkLimits, PrefillTimes
from millrace.core.instance.packing import PackingConfig
from millrace.sim.cluster.spec import SimSpec

_GRANULARITY = 256
#: Prompts whose time is computed; between them the profile's curvature, scaled, is used.
_POINTS = tuple(_GRANULARITY << k for k in range(13))  # to 1 M


def mixed_latency(spec: SimSpec) -> SpLatency:
    """Returns the seconds of whole prompts on one instance's stages.

    The specification must have `packing`.
    """
    assert spec.packing is not None  # checked where there are mixed instances
    whole = spec.profile.prefill.by_sp[1]
    points = _points(spec.profile.operators, spec.packing, spec.spp)
    tokens, seconds = points[-1]
    scaled = whole.scaled(seconds / whole.chunk_s(tokens))
    timed = Latency(a=scaled.a, b=scaled.b, c=scaled.c, d=scaled.d, points=points)
    return SpLatency(by_sp=MappingProxyType({1: timed}))


@lru_cache(maxsize=16)
def _points(
    operators: OperatorModel, packing: PackingConfig, stages: int
) -> tuple[tuple[int, float], ...]:
    if packing.adaptive:
        least, most, step = packing.min_chunk_tokens, packing.max_chunk_tokens, packing.granularity
    else:
        least = most = packing.fixed_chunk_tokens
        step = 1
    times = PrefillTimes(
        operators,
        target_s=packing.t_target_s,
        granularity=_GRANULARITY,
        limits=ChunkLimits(least=least, most=most, step=step),
        spp=stages,
    )
    return tuple((tokens, times.total_s(tokens)) for tokens in _POINTS)
