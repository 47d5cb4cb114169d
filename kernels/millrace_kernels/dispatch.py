"""Which backend does what on which device. The choice is by capability alone, never by timing: two
workers of one kind choose alike.
"""

from __future__ import annotations

from typing import Final

import torch

from millrace_kernels import cpu_backend
from millrace_kernels.plan import AttentionPlan, Backend

ALL_ROWS: Final = cpu_backend.ALL_ROWS


def with_backend(plan: AttentionPlan) -> AttentionPlan:
    """Choose the plan's backend and make that backend's own plan; returns the same plan.

    Raises ValueError when the backend asked for can't do it.
    """
    is_auto = plan.backend is Backend.AUTO
    if is_auto:
        plan.backend = _fastest(plan)
    if plan.backend in (Backend.REFERENCE, Backend.TORCH):
        return plan
    if plan.backend is Backend.CPU:
        if not cpu_backend.takes_dtype(plan.device, plan.dtype):
            raise ValueError(
                f"attention backend 'cpu' can't do {plan.dtype} on {plan.device}: "
                f"{cpu_backend.describe()}"
            )
        plan.native_rows = cpu_backend.attention_rows(plan) if is_auto else ALL_ROWS
        plan.native = cpu_backend.plan(plan)
        return plan
    raise ValueError(f"attention backend {plan.backend.value!r} is not available on {plan.device}")


def _fastest(plan: AttentionPlan) -> Backend:
    if cpu_backend.takes_dtype(plan.device, plan.dtype):
        return Backend.CPU
    return Backend.TORCH


def rows_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Who computes what is not attention: linears, norms, sampling."""
    return Backend.CPU if cpu_backend.takes_dtype(device, dtype) else Backend.TORCH


def describe() -> str:
    """Which of the backends beside torch this machine has, for logs."""
    return cpu_backend.describe()
