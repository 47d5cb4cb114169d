"""Part *speed-moe*: a mixture of experts of the size of Qwen3-30B-A3B beside the device's peaks."""

from __future__ import annotations

from typing import Final

import torch

from millrace.bench.gpu.part import Context
from millrace.bench.gpu.parts.speed import measure
from millrace.bench.gpu.shapes import FAMILIES, QWEN3_30B_A3B

_LEAST_BYTES: Final = 92 << 30
"""61 GB of bfloat16 weights, 26 GB of K/V (128 sequences of 2,048 tokens), and activations."""


def check(context: Context) -> None:
    """Skips where the weights leave too little room."""
    if context.is_cuda and (free := torch.cuda.mem_get_info(context.device)[0]) < _LEAST_BYTES:
        context.found.skipped = f"{free} bytes are free on the device, {_LEAST_BYTES} are needed"
        return
    measure(context, QWEN3_30B_A3B if context.is_cuda else FAMILIES["qwen3_moe"], is_whole=False)
