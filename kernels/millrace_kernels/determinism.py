"""Whether the CPU gives a row the same bits in any pass, or computes it as fast as it can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

_is_on = False


def is_on() -> bool:
    """Returns whether the kernels of this process are deterministic."""
    return _is_on


def use(on: bool) -> None:
    """Sets it for the whole process. Linears that are prepared already may keep their kernels."""
    global _is_on
    _is_on = on
    with suppress(ImportError):  # where it is not built, torch computes
        from millrace_kernels import _cpu

        _cpu.compute_rows_alike(on)


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Sets it in this block."""
    before = _is_on
    use(on)
    try:
        yield
    finally:
        use(before)
