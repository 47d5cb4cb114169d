"""Triton's entry points with types, so that kernels and launches pass a strict type check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton
from torch import Tensor


class Kernel(Protocol):
    """A kernel compiled on demand: `kernel[grid](...)` from the host, `kernel(...)` from other
    kernels.
    """

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]: ...

    # Inside a kernel all values are Triton's, which has no types.
    def __call__(self, *args: Any) -> Any: ...  # noqa: ANN401


def jit(*varying: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Compiles a kernel; `varying` names integers whose value must not make a new variant."""

    def compile_later(function: Callable[..., Any]) -> Kernel:
        kernel: Kernel = triton.jit(function, do_not_specialize=varying)
        return kernel

    return compile_later


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    first: Tensor,
    *args: object,
    num_warps: int = 4,
    num_stages: int = 2,
    max_registers: int = 0,
    **constants: object,
) -> None:
    """Queues a kernel on the current stream of its first argument's device; `constants` are its
    constexpr arguments. `max_registers`: of a thread, so that more programs fit an SM; 0: no limit.

    Multiplies and adds fuse, as in cuBLAS and torch (Triton's default will change).
    """
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call] # torch: untyped
        kernel[grid](
            first,
            *args,
            **constants,
            num_warps=num_warps,
            num_stages=num_stages,
            maxnreg=max_registers or None,
            enable_fp_fusion=True,
        )


def block(size: int) -> int:
    """Returns the power of two that holds `size` elements; a tile's sides are powers of two."""
    return 1 << max(size - 1, 0).bit_length()


def dot_precision(dtype: torch.dtype) -> str:
    """Returns how `tl.dot` multiplies: true float32 for float32, where TF32 would lose 13 bits."""
    return "ieee" if dtype == torch.float32 else "tf32"
