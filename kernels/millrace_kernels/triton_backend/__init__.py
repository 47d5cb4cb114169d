"""Every kernel of the API in Triton, for CUDA devices of compute capability 8.0 and up.

`triton` is optional (extra `gpu`), so this module does not import it; the modules beside it do.
All tensors of a call lie on the current CUDA device. No function waits for the device.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

LEAST_CAPABILITY = (8, 0)


def unavailable() -> str | None:
    """Why this machine can't run these kernels; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton isn't installed (pip install 'millrace[gpu]')"
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return None


def describe() -> str:
    """One phrase on what is here, for logs."""
    return unavailable() or f"triton {importlib.metadata.version('triton')}"
