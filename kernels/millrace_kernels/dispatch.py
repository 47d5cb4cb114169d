"""Which backend does what on which device. The choice is by capability alone, never by timing: two
workers of one kind choose alike.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from millrace_kernels import cpu_backend
from millrace_kernels.plan import AttentionPlan, Backend

ALL_ROWS: Final = cpu_backend.ALL_ROWS


def with_backend(plan: AttentionPlan) -> AttentionPlan:
    """The plan with its backend chosen and that backend's own plan made.

    Raises ValueError when the backend asked for can't do it.
    """
    backend = plan.backend
    if backend is Backend.AUTO:
        backend = _fastest(plan)
    if backend in (Backend.REFERENCE, Backend.TORCH):
        return dataclasses.replace(plan, backend=backend)
    if backend is Backend.CPU:
        if not cpu_backend.takes_dtype(plan.device, plan.dtype):
            raise ValueError(
                f"attention backend 'cpu' can't do {plan.dtype} on {plan.device}: "
                f"{cpu_backend.describe()}"
            )
        rows = ALL_ROWS if plan.backend is Backend.CPU else cpu_backend.attention_rows(plan)
        plan = dataclasses.replace(plan, backend=backend, native_rows=rows)
        return dataclasses.replace(plan, native=cpu_backend.plan(plan))
    raise ValueError(f"attention backend {backend.value!r} is not available on {plan.device}")


def _fastest(plan: AttentionPlan) -> Backend:
    if cpu_backend.takes_dtype(plan.device, plan.dtype):
        return Backend.CPU
    return Backend.TORCH


def describe() -> str:
    """Which of the backends beside torch this machine has, for logs."""
    return cpu_backend.describe()
