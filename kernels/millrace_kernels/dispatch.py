"""Chooses the backend for each operation and device. The choice depends on the device's capability
and the call's shape, never on timing: two workers of one kind choose alike. FlashInfer, which
compiles at its first use, is tried first.

Triton and FlashInfer are optional, so neither is imported before a call needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor

from millrace_kernels import cpu_backend, flashinfer_backend, torch_backend, trial, triton_backend
from millrace_kernels.cpu_backend import rows as cpu_rows
from millrace_kernels.plan import AttentionPlan, Backend
from millrace_kernels.row_operations import Rows

log = logging.getLogger(__name__)

_FASTEST_FIRST: Final = (Backend.CPU, Backend.FLASHINFER, Backend.TRITON)
_AFTER_FLASHINFER: Final = (Backend.TRITON,)

_tried: dict[Hashable, str] = {}  # why FlashInfer failed, by shape
_fallbacks = 0


def with_backend(plan: AttentionPlan) -> AttentionPlan:
    """Chooses the plan's backend and makes that backend's own plan; returns the same plan.

    Raises ValueError when the wanted backend can't do it.
    """
    plan.is_auto = plan.backend is Backend.AUTO
    if plan.is_auto:
        plan.backend = _first_of(_FASTEST_FIRST, plan)
        if plan.backend is Backend.FLASHINFER and not flashinfer_backend.fills(plan):
            plan.backend = _first_of(_AFTER_FLASHINFER, plan)
        if plan.backend is Backend.FLASHINFER and (reason := _trial(plan)):
            _give_on(plan, f"failed its trial ({reason})")
            return plan
    elif reason := _refusal(plan.backend, plan):
        raise ValueError(f"attention backend {plan.backend.value!r}: {reason}")
    try:
        _make_native(plan)
    except Exception as error:  # any error of FlashInfer, its compiler or the driver
        if not _falls_back(plan, error):
            raise
    return plan


def run_native(
    plan: AttentionPlan,
    q_nhd: Tensor,
    kv_layer: Tensor,
    *,
    scale: float,
    out_nhd: Tensor,
    lse_nh: Tensor,
) -> None:
    """Runs the part of a plan that its backend computes by its own plan.

    Where FlashInfer fails, the next backend computes the plan instead, and all later plans of its
    shape, unless FlashInfer was asked for by name.
    """
    while plan.native is not None:
        try:
            plan.native.run(q_nhd, kv_layer, scale=scale, out_nhd=out_nhd, lse_nh=lse_nh)
            return
        except Exception as error:  # as above
            if not _falls_back(plan, error):
                raise


def fallbacks() -> int:
    """Returns how many plans another backend has computed because FlashInfer failed on their
    shape."""
    return _fallbacks


def _first_of(backends: Sequence[Backend], plan: AttentionPlan) -> Backend:
    able = (backend for backend in backends if not _refusal(backend, plan))
    return next(able, Backend.TORCH)


def _make_native(plan: AttentionPlan) -> None:
    """Makes the backend's own plan. Raises what the backend raises."""
    if plan.backend in (Backend.REFERENCE, Backend.TORCH):
        plan.native = None
        return
    if plan.backend is Backend.CPU:
        plan.native = cpu_backend.plan(plan)
    elif plan.backend is Backend.FLASHINFER:
        plan.native = flashinfer_backend.plan(plan)
    else:
        from millrace_kernels.triton_backend import attention

        plan.native = attention.plan(plan)


def _falls_back(plan: AttentionPlan, error: Exception) -> bool:
    """Gives a plan on that FlashInfer has failed. False for a plan that no other backend may
    take."""
    if plan.backend is not Backend.FLASHINFER or not plan.is_auto:
        return False
    reason = trial.reason_of(error)
    _tried[_shape_of(plan)] = reason
    _give_on(plan, f"failed a call ({reason})")
    return True


def _give_on(plan: AttentionPlan, why: str) -> None:
    """Makes the plan of the next backend after FlashInfer."""
    global _fallbacks
    _fallbacks += 1
    plan.backend = _first_of(_AFTER_FLASHINFER, plan)
    _tell_once(plan.device, why, plan.backend)
    _make_native(plan)


def _trial(plan: AttentionPlan) -> str:
    """Returns why FlashInfer fails on calls of the plan's shape, or "". Each shape is tried
    once."""
    key = _shape_of(plan)
    if key not in _tried:
        _tried[key] = trial.failure(plan, flashinfer_backend.plan)
    return _tried[key]


def _shape_of(plan: AttentionPlan) -> Hashable:
    """Returns all properties of a plan by which FlashInfer's compiled modules differ."""
    return (
        plan.device,
        plan.dtype,
        (plan.num_q_heads, plan.num_kv_heads, plan.head_dim, plan.page_tokens),
        (plan.causal, plan.sliding_window is None, plan.soft_cap is None),
    )


@cache
def _tell_once(device: torch.device, why: str, instead: Backend) -> None:
    log.warning("attention on %s runs by %s: FlashInfer %s", device, instead, why)


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
