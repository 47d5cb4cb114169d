"""Every kernel of the API in Triton, for CUDA devices of compute capability 8.0 and up.

`triton` is optional (extra `gpu`), so this module does not import it; the modules beside it do.
All tensors of a call lie on one CUDA device. No function waits for the device.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import cache
from typing import Final

import torch

LEAST_CAPABILITY: Final = (8, 0)
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS: Final = (64, 128, 256)
"""The head_dims of the committed tiles; a head_dim between two uses the larger one's."""


@cache
def unavailable(device: torch.device) -> str:
    """Returns why these kernels can't run on the device, or ""."""
    if device.type != "cuda":
        return f"Triton needs a CUDA device, not {device}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"Triton's kernels need compute capability 8.0, {device} has {capability}"
    return ""


def refusal(dtype: torch.dtype, head_dim: int | None = None) -> str:
    """Returns why no kernel takes this dtype or head_dim (None: no heads), or ""."""
    if dtype not in DTYPES:
        return f"dtype must be bfloat16, float16 or float32, got {dtype}"
    if head_dim is not None and head_dim > HEAD_DIMS[-1]:
        return f"head_dim must be at most {HEAD_DIMS[-1]}, got {head_dim}"
    return ""


def describe() -> str:
    """Describes Triton in one phrase, for logs."""
    reason = unavailable(torch.device("cuda"))
    return f"no Triton ({reason})" if reason else f"Triton {importlib.metadata.version('triton')}"
