"""Predicts the seconds of a mixed pass from offline measurements, corrected by observed passes.

Medha section 4.3 predicts from profiles that are made once. A device's speed also depends on its
load now (another process on its cores, a lower clock), and a brief measurement at start may be far
off in one operator. So each part of a prediction has a factor: linear layers with all costs once
per pass, attention of chunks to themselves, to their histories, and of decodes. With the
measured time s and the predicted p = sum f_k c_k, the logarithms of the factors move by

    r w_k / sum w_j^2,    r = RATE ln(s / p),    w_k = f_k c_k / p,

the least change that removes the share RATE of the error (normalised least mean squares, in
logarithms): the part with most of the time is corrected most. Passes of decodes alone, which run
from a recording, have their own factors.
"""

from __future__ import annotations

import math
from typing import Final

from millrace.core.cost.operators import BatchShape, OperatorModel

RATE: Final = 0.2
#: Larger errors count as this much: a page fault or a paused process may cause them.
_MOST_SAID: Final = math.log(3.0)
_MOST: Final = 64.0

Parts = tuple[float, float, float, float]


class Predictor:
    """A `PassModel` that learns from observed passes."""

    def __init__(self, model: OperatorModel) -> None:
        self._model = model
        self._mixed = [1.0, 1.0, 1.0, 1.0]
        self._decodes = [1.0, 1.0, 1.0, 1.0]
        self._overall = 0.0  # ln(measured / model) of passes with chunks

    def pass_s(self, batch: BatchShape) -> float:
        """Predicts the seconds of an iteration."""
        factors = self._factors(batch)
        return sum(f * part for f, part in zip(factors, self._parts(batch), strict=True))

    def observe(self, batch: BatchShape, seconds: float) -> None:
        """Corrects the factors by the measured seconds of a pass."""
        parts, factors = self._parts(batch), self._factors(batch)
        predicted_s = sum(f * part for f, part in zip(factors, parts, strict=True))
        if predicted_s <= 0.0 or seconds <= 0.0:
            return
        shares = [f * part / predicted_s for f, part in zip(factors, parts, strict=True)]
        off = math.log(seconds / predicted_s)
        step = RATE * min(max(off, -_MOST_SAID), _MOST_SAID) / sum(share**2 for share in shares)
        for k, share in enumerate(shares):
            factors[k] = min(max(factors[k] * math.exp(step * share), 1.0 / _MOST), _MOST)
        if batch.prefills:
            self._overall += RATE * (math.log(seconds / sum(parts)) - self._overall)

    @property
    def factor(self) -> float:
        """The ratio of measured to model seconds of recent passes with chunks."""
        return math.exp(self._overall)

    def _factors(self, batch: BatchShape) -> list[float]:
        return self._mixed if batch.prefills else self._decodes

    def _parts(self, batch: BatchShape) -> Parts:
        """Splits the model's seconds: all but attention, then attention of chunks to themselves, to
        their histories, and of decodes."""
        model, layers = self._model, self._model.layers
        attn_s = layers * model.layer_s(batch)[1]
        own_s = layers * sum(model.attn.at(tokens * tokens) for tokens, _ in batch.prefills)
        decodes_s = 0.0
        if batch.decodes:
            decodes_s = layers * model.decode_attn.at(batch.decodes, batch.decode_context_tokens)
        rest_s = max(model.pass_s(batch) - attn_s, 0.0)
        return rest_s, own_s, max(attn_s - own_s - decodes_s, 0.0), decodes_s
