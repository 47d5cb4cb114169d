"""The CUDA graphs that an engine captures, from its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace_kernels import triton_backend
from millrace_kernels.dispatch import rows_backend
from millrace_kernels.plan import Backend

_ROWS: Final = (16, 32, 64, 128, 256, 512)
"""Rows of passes to capture. Up to some 300 rows a pass of a large model takes the time of reading
its weights, so padding to the next power of two costs little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """The graphs of decode steps, by sequences, and of short passes over prompts, by rows; both
    ascending, and empty without graphs. `context_tokens`: the longest context of a sequence.
    `is_required`: an instance without the graphs of decode steps does not start."""

    batches: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    context_tokens: int = 0
    is_required: bool = False


NO_GRAPHS: Final = GraphSizes()


def graph_sizes(
    config: EngineConfig, head_dim: int, device: torch.device, dtype: torch.dtype, context: int
) -> GraphSizes:
    """Returns the graphs of an engine.

    Raises ConfigError where `cuda_graphs` is on and graphs of decode steps can't be captured, or a
    size is above `max_batch` or `max_chunk_tokens`.
    """
    batches = _sizes("cuda_graph_batches", config.cuda_graph_batches, "max_batch", config.max_batch)
    rows = _sizes("cuda_graph_rows", _rows(config), "max_chunk_tokens", config.max_chunk_tokens)
    reason = refusal(config, head_dim, device, dtype)
    if reason and config.cuda_graphs == "on":
        raise ConfigError(f"engine.cuda_graphs is 'on', but {reason}")
    powers = [1 << i for i in range(config.max_batch.bit_length()) if 1 << i < config.max_batch]
    return GraphSizes(
        batches=() if reason else batches or (*powers, config.max_batch),
        rows=() if rows_refusal(config, device, dtype) else rows,
        context_tokens=context,
        is_required=config.cuda_graphs == "on",
    )


def refusal(config: EngineConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> str:
    """Returns why an engine captures no graphs of decode steps, or ""."""
    if reason := _refusal(config, device):
        return reason
    if config.attention_backend not in (Backend.AUTO, Backend.TRITON):
        return f"graphs need Triton, and engine.attention_backend is {config.attention_backend!r}"
    return triton_backend.unavailable(device) or triton_backend.refusal(dtype, head_dim)


def rows_refusal(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Returns why an engine captures no graphs of short passes over prompts, or "". Attention is
    outside these graphs, so that any backend may compute it."""
    if reason := _refusal(config, device):
        return reason
    if config.cuda_graph_rows == "none":
        return "engine.cuda_graph_rows is none"
    if rows_backend(device, dtype) is not Backend.TRITON:
        return triton_backend.unavailable(device) or triton_backend.refusal(dtype)
    return ""


def describe(config: EngineConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> str:
    """Describes in phrases how an engine computes on a GPU, for the log; "" for the CPU."""
    if device.type != "cuda":
        return ""
    reasons = {
        "decode": refusal(config, head_dim, device, dtype),
        "short prefills": rows_refusal(config, device, dtype),
    }
    return "".join(
        f", {what} without CUDA graphs ({reason})" if reason else f", {what} by CUDA graphs"
        for what, reason in reasons.items()
    )


def _refusal(config: EngineConfig, device: torch.device) -> str:
    if config.cuda_graphs == "off":
        return "engine.cuda_graphs is off"
    if device.type != "cuda":
        return f"the engine runs on {device}"
    if config.stages > 1:
        return f"engine.stages is {config.stages}; graphs need one stage"
    if config.tensor_parallel > 1:
        return f"engine.tensor_parallel is {config.tensor_parallel}; graphs need one rank"
    return ""


def _rows(config: EngineConfig) -> str:
    """Returns the rows to capture as a setting: of the usual ones, those that a pass may have."""
    if config.cuda_graph_rows:
        return config.cuda_graph_rows.removeprefix("none")
    return ",".join(str(min(size, config.max_chunk_tokens)) for size in _ROWS)


def _sizes(name: str, text: str, limit: str, most: int) -> tuple[int, ...]:
    given = sorted({int(size) for size in text.split(",") if size})
    if given and given[-1] > most:
        raise ConfigError(f"engine.{name} has {given[-1]}; engine.{limit} is {most}")
    return tuple(given)
