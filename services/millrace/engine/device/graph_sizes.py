"""The CUDA graphs that an engine captures, from its settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace_kernels import triton_backend
from millrace_kernels.plan import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """`batches`: the numbers of sequences to capture, ascending. `context_tokens`: the longest
    context of a sequence."""

    batches: tuple[int, ...]
    context_tokens: int


def graph_sizes(
    config: EngineConfig, head_dim: int, device: torch.device, dtype: torch.dtype, context: int
) -> GraphSizes | None:
    """Returns the graphs of decode steps; None for steps without graphs.

    Raises ConfigError where `cuda_graphs` is on and graphs can't be captured, or a size of
    `cuda_graph_batches` is above `max_batch`.
    """
    given = sorted({int(size) for size in config.cuda_graph_batches.split(",") if size})
    if given and given[-1] > config.max_batch:
        raise ConfigError(
            f"engine.cuda_graph_batches has {given[-1]}; engine.max_batch is {config.max_batch}"
        )
    reason = refusal(config, head_dim, device, dtype)
    if reason and config.cuda_graphs == "on":
        raise ConfigError(f"engine.cuda_graphs is 'on', but {reason}")
    if reason:
        return None
    powers = [1 << i for i in range(config.max_batch.bit_length()) if 1 << i < config.max_batch]
    return GraphSizes(batches=tuple(given or [*powers, config.max_batch]), context_tokens=context)


def refusal(config: EngineConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> str:
    """Returns why an engine captures no graphs, or ""."""
    if config.cuda_graphs == "off":
        return "engine.cuda_graphs is off"
    if device.type != "cuda":
        return f"the engine runs on {device}"
    if config.tensor_parallel > 1:
        return f"engine.tensor_parallel is {config.tensor_parallel}; graphs need one rank"
    if config.attention_backend not in (Backend.AUTO, Backend.TRITON):
        return f"graphs need Triton, and engine.attention_backend is {config.attention_backend!r}"
    return triton_backend.unavailable(device) or triton_backend.refusal(dtype, head_dim)


def describe(config: EngineConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> str:
    """Describes in a phrase how decode steps run on a GPU, for the log; "" for the CPU."""
    if device.type != "cuda":
        return ""
    reason = refusal(config, head_dim, device, dtype)
    return f", decode without CUDA graphs ({reason})" if reason else ", decode by CUDA graphs"
