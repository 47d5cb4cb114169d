"""Compute that stands for a layer's, which can hide transfers."""

from __future__ import annotations

import time

import torch


class LayerProduct:
    """Matrix products that take about `layer_ms`, as a layer does."""

    def __init__(self, layer_ms: float) -> None:
        self._left = torch.rand(384, 384)
        self._right = torch.rand(384, 384)
        self._out = torch.empty(384, 384)
        self._times = 1
        for _ in range(3):  # the first rounds find the clock speed and fill the caches
            self._times = 200
            started_s = time.perf_counter()
            self.compute()
            self._times = max(1, round(layer_ms / 1e3 / (time.perf_counter() - started_s) * 200))

    def compute(self) -> None:
        for _ in range(self._times):
            torch.mm(self._left, self._right, out=self._out)
