"""Random weights from a config alone (`load_format="dummy"`), for benchmarks and tests.

One block of normal numbers is drawn and laid end to end over all weights. Its length is a prime, so
rows of a matrix never repeat in step with it, and filling runs at the speed of a copy: a model of
7e9 parameters takes seconds. NumPy's PCG64 makes the numbers the same on every machine, as the
processes of one fleet must agree on them.
"""

from __future__ import annotations

import numpy as np
import torch

from millrace.engine.model.weights.fused import WeightKind, WeightSpec

_BLOCK_ELEMENTS = 4_194_301  # the largest prime below 2^22
_STANDARD_DEVIATION = 0.02
_NORM_SPREAD = 0.1


class RandomWeights:
    """Fills weights in the order asked; the same order gives the same weights for a seed."""

    def __init__(self, seed: int) -> None:
        draws = np.random.Generator(np.random.PCG64(seed)).standard_normal(
            _BLOCK_ELEMENTS, dtype=np.float32
        )
        self._block = torch.from_numpy(draws)
        self._scaled: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._at = 0

    def fill(self, weight: torch.Tensor, spec: WeightSpec, whole: WeightSpec) -> None:
        """Fills matrices and biases ~ N(0, 0.02), norms ~ N(1, 0.1).

        `spec` is `whole`, or a rank's piece of it, which gets the numbers it has in the whole.
        """
        if spec is whole:
            self._draw(weight, spec)
            return
        drawn = torch.empty(whole.shape, dtype=weight.dtype, device=weight.device)
        self._draw(drawn, whole)
        for part, all_of_it in zip(spec.parts, whole.parts, strict=True):
            weight[part.index] = drawn[all_of_it.index][part.source]

    def skip(self, spec: WeightSpec) -> None:
        """Skips a weight that another rank has."""
        self._at = (self._at + spec.elements) % _BLOCK_ELEMENTS

    def _draw(self, weight: torch.Tensor, spec: WeightSpec) -> None:
        key = (weight.dtype, weight.device)
        if key not in self._scaled:
            self._scaled[key] = (self._block * _STANDARD_DEVIATION).to(weight.device, weight.dtype)
        block = self._scaled[key]
        flat = weight.view(-1)
        filled = 0
        while filled < flat.numel():
            count = min(flat.numel() - filled, _BLOCK_ELEMENTS - self._at)
            flat[filled : filled + count] = block[self._at : self._at + count]
            filled += count
            self._at = (self._at + count) % _BLOCK_ELEMENTS
        if spec.kind is WeightKind.NORM:
            weight.mul_(_NORM_SPREAD / _STANDARD_DEVIATION).add_(1.0)
