"""Attention and the small operators around it, for the CPU and CUDA. Imports torch, no more."""

from __future__ import annotations

from millrace_kernels.api import (
    AttentionPlan,
    Backend,
    Experts,
    Linear,
    add_rms_norm,
    apply_rope,
    describe_backends,
    linear,
    merge_attention_,
    plan_attention,
    prepare_experts,
    prepare_linear,
    rms_norm,
    rope_write_kv,
    run_attention,
    silu_mul,
    write_kv,
)

__all__ = [
    "AttentionPlan",
    "Backend",
    "Experts",
    "Linear",
    "add_rms_norm",
    "apply_rope",
    "describe_backends",
    "linear",
    "merge_attention_",
    "plan_attention",
    "prepare_experts",
    "prepare_linear",
    "rms_norm",
    "rope_write_kv",
    "run_attention",
    "silu_mul",
    "write_kv",
]
