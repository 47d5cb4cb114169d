"""Attention and the small operators around it, for the CPU and CUDA. Imports torch, no more."""

from __future__ import annotations

from millrace_kernels.api import (
    add_rms_norm,
    apply_rope,
    describe_backends,
    linear,
    plan_attention,
    rms_norm,
    run_attention,
    silu_mul,
    write_kv,
)
from millrace_kernels.plan import AttentionPlan, Backend

__all__ = [
    "AttentionPlan",
    "Backend",
    "add_rms_norm",
    "apply_rope",
    "describe_backends",
    "linear",
    "plan_attention",
    "rms_norm",
    "run_attention",
    "silu_mul",
    "write_kv",
]
