"""Tile sizes of the kernels, by kernel, GPU, dtype and head_dim: a lookup, never a search.

`configs.json` holds them. Its "measured" names the entries that `python -m
millrace_kernels.tune_triton` has measured, and on which GPU; the others were chosen from shared
memory, registers and tile shapes. The sm_80 entries also serve 8.6, 8.9 and 12.0, so they keep to
those GPUs' 99 KiB of shared memory; sm_90 serves 10.0 as well.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from millrace_kernels.triton_backend import HEAD_DIMS, LEAST_CAPABILITY, refusal

PATH: Final = Path(__file__).with_name("configs.json")

Config = Mapping[str, int]
"""`num_warps`, `num_stages`, the kernel's own block sizes, and perhaps `max_registers`."""

_trying: dict[str, Config] = {}


def key(kernel: str, gpu: str, dtype: torch.dtype, head_dim: int | None = None) -> str:
    """Names one entry: `attend_rows/sm_90/16bit/d128`, without the last part for kernels without
    heads. A head_dim between two committed ones uses the larger one's.

    Raises ValueError for a dtype or head_dim that no kernel takes.
    """
    if reason := refusal(dtype, head_dim):
        raise ValueError(reason)
    parts = [kernel, gpu, "32bit" if dtype == torch.float32 else "16bit"]
    if head_dim is not None:
        parts.append(f"d{next(known for known in HEAD_DIMS if known >= head_dim)}")
    return "/".join(parts)


def lookup(
    kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int | None = None
) -> Config:
    """Returns the configuration with which `kernel` runs on `device`. Raises ValueError as `key`
    does.
    """
    if kernel in _trying:
        return _trying[kernel]
    return committed()[key(kernel, gpu_name(device), dtype, head_dim)]


@functools.cache
def committed() -> Mapping[str, Config]:
    """Returns all entries of `configs.json`, by `key`."""
    configs: dict[str, Config] = json.loads(PATH.read_text())["configs"]
    return configs


def measured() -> Mapping[str, str]:
    """Returns the GPUs on which entries were measured, by `key`; no other entry has run on one."""
    gpus: dict[str, str] = json.loads(PATH.read_text())["measured"]
    return gpus


@functools.cache
def gpu_name(device: torch.device) -> str:
    """Returns the GPU name whose entries `device` uses. Raises ValueError below compute capability
    8.0.
    """
    if device.type != "cuda":  # Triton's interpreter
        return "sm_80"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise ValueError(f"{device} has compute capability {capability}, 8.0 is the least")
    return "sm_90" if (9, 0) <= capability < (12, 0) else "sm_80"


@contextlib.contextmanager
def trying(**configs: Config) -> Iterator[None]:
    """Runs those kernels with these configurations within the block, instead of the table's."""
    before = dict(_trying)
    _trying.update(configs)
    try:
        yield
    finally:
        _trying.clear()
        _trying.update(before)
