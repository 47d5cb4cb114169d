"""Part *oracle*: the engine on the device against the engine on the CPU, for every family.

The CPU computes attention by the float64 reference. Weights are random and the same on both.
"""

from __future__ import annotations

from typing import Final

import torch

from millrace.bench.gpu.part import Context
from millrace.bench.gpu.shapes import FAMILIES
from millrace.bench.gpu.small_engine import logits_of, small_engine
from millrace_kernels import flashinfer_backend

_TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference of two logits, in standard deviations of all logits. A bfloat16 number is
off by up to 2^-8 of itself, and three layers add some dozens of such errors."""


@torch.inference_mode()
def check(context: Context) -> None:
    """Compares float32, and bfloat16 where no near tie may choose other experts."""
    for family in FAMILIES:
        is_moe = "num_experts_per_tok" in FAMILIES[family]
        for dtype in ("float32",) if is_moe else ("float32", "bfloat16"):
            compare(context, family, dtype)


def compare(context: Context, family: str, dtype: str) -> None:
    """Compares one family on each backend that may compute its attention on the device."""
    with small_engine(FAMILIES[family], "cpu", dtype, "reference") as engine:
        wanted = logits_of(engine)
    for backend in backends(context, dtype):
        try:
            with small_engine(FAMILIES[family], str(context.device), dtype, backend) as engine:
                found = logits_of(engine)
                computed = engine.backends.partition(";")[0]
        except Exception as refusal:
            if not flashinfer_backend.is_not_prebuilt(refusal):
                raise
            context.claim(f"{family} {dtype} {backend}: skipped", True, "no prebuilt module")
            continue
        error = float((found - wanted).abs().max() / wanted.std())
        # Not above: a NaN is an error too.
        context.claim(
            f"{family} {dtype} {backend}",
            error <= _TOLERANCE[dtype],
            f"largest difference {error:.2g} standard deviations; {computed}",
        )


def backends(context: Context, dtype: str) -> tuple[str, ...]:
    """Returns the settings of the attention's backend to try."""
    if not context.is_cuda:
        return ("auto",)
    is_fit = dtype == "bfloat16" and not flashinfer_backend.unavailable(context.device)
    return ("auto", "triton", "flashinfer") if is_fit else ("auto", "triton")
