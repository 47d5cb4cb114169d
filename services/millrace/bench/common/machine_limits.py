"""Describes this machine and measures its limits: products of matrices, and reading memory.

The threads are the threads that torch uses.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from millrace_kernels.api import describe_backends, prepare_linear

GEMM_SIZE = 2048
READ_BYTES = 512 << 20
"""Bytes far beyond any cache."""

_ROW = 4096  # columns of the matrix that the readers see in the bytes


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Lets torch compute with `count` threads until the block ends; None: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_machine() -> dict[str, Any]:
    """Returns the machine's description for a report."""
    return {
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "architecture": platform.machine(),
        "torch": torch.__version__,
        "kernels": describe_backends(),
    }


def gemm_flops_per_s(dtype: str, size: int = GEMM_SIZE, repeats: int = 5) -> float:
    """Returns FLOP/s of a square product [size, size] x [size, size], the best of torch's and our
    own.
    """
    left, right = torch.randn(2, size, size).to(getattr(torch, dtype))
    linear = prepare_linear(right)
    products: tuple[Callable[[], object], ...] = (lambda: left @ right, lambda: linear(left))
    return 2.0 * size**3 / min(_best_s(product, repeats) for product in products)


def read_bytes_per_s(size_bytes: int = READ_BYTES, repeats: int = 5) -> float:
    """Returns bytes/s of streaming reads, the best of several readers."""
    matrix = torch.ones(max(size_bytes // (4 * _ROW), 1), _ROW)
    vector = torch.ones(_ROW)
    row = vector[None]
    linear = prepare_linear(matrix)
    readers: tuple[Callable[[], object], ...] = (
        matrix.sum,
        matrix.amax,
        lambda: matrix.sum(1),
        lambda: torch.mv(matrix, vector),
        lambda: linear(row),
    )
    return 4.0 * matrix.numel() / min(_best_s(reader, repeats) for reader in readers)


def _best_s(work: Callable[[], object], repeats: int) -> float:
    """Returns seconds of the fastest call, after one warm-up; a slow call is repeated less
    often.
    """
    work()
    best_s = spent_s = 0.0
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        took_s = time.perf_counter() - begun
        best_s = min(best_s or took_s, took_s)
        spent_s += took_s
        if spent_s > 1.0:
            break
    return best_s
