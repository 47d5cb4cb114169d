"""The planners of a pool: one for each history of a prompt and each correction of its times.

Tetris section 5.1 compares groups by Eq. (1) as it was fitted. Deviation: queue times and the times
of chunks are corrected by the times that the pool's instances took. Otherwise a queue on a slow
pool looks longer than it is, and a degree whose ring is slower than the profile says is still
chosen. The factor of a degree is the pool's correction for the whole prompt, rounded on a scale of
`STEP`. So a model that is right within some percent stays unchanged, and few planners are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from millrace.core.cost.correction import Band, band_of
from millrace.core.cost.latency import SpLatency
from millrace.core.scheduler.planning import PLANNERS, Planner, PlannerInputs
from millrace.core.scheduler.planning.cdsp_reference import usable_degrees

#: Between two factors, as a logarithm.
STEP = 0.1
#: Planners that are kept.
MOST = 32


class Planners:
    """The configured planner of a pool, with a latency model that is corrected for each prompt.

    corrected(band, seconds): the corrected time of work of that band, which takes `seconds` by the
    model.
    """

    def __init__(self, inputs: PlannerInputs, corrected: Callable[[Band, float], float]) -> None:
        self._inputs = inputs
        self._corrected = corrected
        self._degrees = usable_degrees(inputs)
        self._as_fitted = (0,) * len(self._degrees)
        self._made: dict[tuple[tuple[int, ...], int, float | None], Planner] = {}

    def inputs(self, prompt_tokens: int, history: int) -> PlannerInputs:
        """Returns the inputs for the tokens of such a prompt after the first `history` tokens."""
        return self._after(self._steps(prompt_tokens, history), history)

    def of(self, prompt_tokens: int, history: int, rate: float | None = None) -> Planner:
        """Returns the planner of these tokens, with another improvement rate where one is given."""
        key = self._steps(prompt_tokens, history), history, rate
        planner = self._made.get(key)
        if planner is None:
            inputs = self._after(*key[:2])
            if rate is not None:
                inputs = replace(inputs, config=replace(inputs.config, improvement_rate=rate))
            if len(self._made) == MOST:
                del self._made[next(iter(self._made))]
            planner = self._made[key] = PLANNERS[inputs.config.planner](inputs)
        return planner

    def _steps(self, prompt_tokens: int, history: int) -> tuple[int, ...]:
        """Returns each degree's factor in steps."""
        return tuple(self._step(prompt_tokens, history, sp) for sp in self._degrees)

    def _step(self, prompt_tokens: int, history: int, sp: int) -> int:
        modelled_s = self._inputs.latency.chunk_s(prompt_tokens - history, history, sp)
        if modelled_s <= 0.0:
            return 0
        seconds = self._corrected(band_of(prompt_tokens, sp), modelled_s)
        return round(math.log(seconds / modelled_s) / STEP)

    def _after(self, steps: tuple[int, ...], history: int) -> PlannerInputs:
        inputs = self._inputs
        if steps != self._as_fitted:
            by_sp = {
                sp: inputs.latency.by_sp[sp].scaled(math.exp(STEP * step))
                for sp, step in zip(self._degrees, steps, strict=True)
            }
            inputs = replace(inputs, latency=SpLatency(by_sp=MappingProxyType(by_sp)))
        return replace(inputs, history=history) if history else inputs
