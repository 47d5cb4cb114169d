"""Chooses the backend for each operation and device. The choice depends on capability alone, never
on timing: two workers of one kind choose alike. FlashInfer, which compiles at its first use, is
tried first.

Triton and FlashInfer are optional, so neither is imported before a call needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from functools import cache
from typing import Final

import torch
from torch import Tensor

from millrace_kernels import cpu_backend, flashinfer_backend, torch_backend, trial, triton_backend
from millrace_kernels.cpu_backend import rows as cpu_rows
from millrace_kernels.plan import AttentionPlan, Backend
from millrace_kernels.row_operations import Rows

log = logging.getLogger(__name__)

ALL_ROWS: Final = cpu_backend.ALL_ROWS

_FASTEST_FIRST: Final = (Backend.CPU, Backend.FLASHINFER, Backend.TRITON)

_tried: dict[Hashable, str] = {}  # why FlashInfer failed, by shape


def with_backend(plan: AttentionPlan) -> AttentionPlan:
    """Chooses the plan's backend and makes that backend's own plan; returns the same plan.

    Raises ValueError when the wanted backend can't do it.
    """
    is_auto = plan.backend is Backend.AUTO
    if is_auto:
        able = (backend for backend in _FASTEST_FIRST if not _refusal(backend, plan))
        plan.backend = next(able, Backend.TORCH)
        if plan.backend is Backend.FLASHINFER and (reason := _trial(plan)):
            plan.backend = next(able, Backend.TORCH)
            _tell_once(plan.device, reason, plan.backend)
    elif reason := _refusal(plan.backend, plan):
        raise ValueError(f"attention backend {plan.backend.value!r}: {reason}")
    if plan.backend in (Backend.REFERENCE, Backend.TORCH):
        return plan
    plan.native_rows = ALL_ROWS
    if plan.backend is Backend.CPU:
        if is_auto:
            plan.native_rows = cpu_backend.attention_rows(plan)
        plan.native = cpu_backend.plan(plan)
    elif plan.backend is Backend.FLASHINFER:
        plan.native = flashinfer_backend.plan(plan)
    else:
        from millrace_kernels.triton_backend import attention

        plan.native = attention.plan(plan)
    return plan


def _trial(plan: AttentionPlan) -> str:
    """Returns why FlashInfer fails on calls of the plan's shape, or "". Each shape is tried once.

    The key has all properties by which its compiled modules differ.
    """
    key = (
        plan.device,
        plan.dtype,
        (plan.num_q_heads, plan.num_kv_heads, plan.head_dim, plan.page_tokens),
        (plan.causal, plan.sliding_window is None, plan.soft_cap is None),
    )
    if key not in _tried:
        _tried[key] = trial.failure(plan, flashinfer_backend.plan)
    return _tried[key]


@cache
def _tell_once(device: torch.device, reason: str, instead: Backend) -> None:
    log.warning(
        "attention on %s runs by %s: FlashInfer failed its trial (%s)", device, instead, reason
    )


def _refusal(backend: Backend, plan: AttentionPlan) -> str:
    """Returns why a backend can't do the plan, or ""."""
    if backend is Backend.CPU:
        if cpu_backend.takes_dtype(plan.device, plan.dtype):
            return ""
        return f"it can't do {plan.dtype} on {plan.device} ({cpu_backend.describe()})"
    if backend is Backend.FLASHINFER:
        return flashinfer_backend.unavailable(plan.device) or flashinfer_backend.refusal(plan)
    if backend is Backend.TRITON:
        return triton_backend.unavailable(plan.device) or triton_backend.refusal(
            plan.dtype, plan.head_dim
        )
    return ""


def rows_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Returns the backend of all operations other than attention: linears, norms, sampling."""
    if cpu_backend.takes_dtype(device, dtype):
        return Backend.CPU
    if triton_backend.unavailable(device) or triton_backend.refusal(dtype):
        return Backend.TORCH
    return Backend.TRITON


def rows(x: Tensor) -> Rows:
    """Returns the backend's functions for tensors like x."""
    if cpu_backend.takes(x):  # a decode step asks dozens of times
        return cpu_rows
    is_triton = rows_backend(x.device, x.dtype) is Backend.TRITON
    return _triton_rows() if is_triton else torch_backend


@cache
def _triton_rows() -> Rows:
    from millrace_kernels.triton_backend import rows

    return rows


def describe() -> str:
    """Describes the backends beside torch, and why others are missing, for logs."""
    described = (cpu_backend.describe(), triton_backend.describe(), flashinfer_backend.describe())
    return ", ".join(described)
