"""The seconds of a mixed pass, as measured offline and corrected by the passes that were run.

Medha section 4.3 takes predictions from profiles made once. Here what a device makes of them at the
moment counts too (another process on its cores, a lower clock): recent passes move one factor for
passes with chunks and one for decodes alone, as `core.correction` does for whole prefills.
"""

from __future__ import annotations

from millrace.core.correction import CorrectionConfig, Corrections
from millrace.core.operators import BatchShape
from millrace.core.packing import PassModel

#: Passes come by the dozen a second, and one of them says little.
_CONFIG = CorrectionConfig(weight=0.1)


class Predictor:
    """A `PassModel` that learns."""

    def __init__(self, model: PassModel) -> None:
        self._model = model
        self._corrections = Corrections(_CONFIG)

    def pass_s(self, batch: BatchShape) -> float:
        """Seconds of an iteration."""
        return self._model.pass_s(batch) * self._corrections.factor(_kind(batch))

    def observe(self, batch: BatchShape, seconds: float) -> None:
        """A pass has taken so long."""
        predicted_s = self._model.pass_s(batch)
        self._corrections.observe(_kind(batch), predicted_s=predicted_s, observed_s=seconds)

    @property
    def factor(self) -> float:
        """Of passes with chunks: how much slower this machine is than it was measured."""
        return self._corrections.factor(_MIXED)


_MIXED, _DECODES = "mixed", "decodes"


def _kind(batch: BatchShape) -> str:
    return _MIXED if batch.prefills else _DECODES
