"""The kernels of a CPU, one after another in one test, which makes its inputs and the reference's
results once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millrace_kernels import cpu_backend, determinism
from millrace_kernels.determinism import Alike

KERNELS = [
    f"{order}-{name}"
    for name in cpu_backend.instruction_sets()
    for order in ("fast", "deterministic")
]
"""C++ under each instruction set of this machine, fast and with the same bits in any pass."""

BACKENDS = ["torch", *KERNELS]


@contextmanager
def using(kernels: str) -> Iterator[str]:
    """Computes with some of `BACKENDS` in this block. Yields the name of attention's backend."""
    order, _, name = kernels.rpartition("-")
    if not order:
        yield kernels
        return
    alike = Alike.PASSES if order == "deterministic" else Alike.NOWHERE
    with cpu_backend.instruction_set(name), determinism.switched(alike):
        yield "cpu"
