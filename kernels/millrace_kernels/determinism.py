"""Whether the CPU gives a row the same bits in any pass, or computes it as fast as it can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum


class Alike(IntEnum):
    """Where a row gets the same bits."""

    NOWHERE = 0  # each pass as fast as can be
    PASSES = 1  # in every pass of an instance
    GROUPS = 2  # and in those of sequence-parallel groups


_alike = Alike.NOWHERE


def is_on() -> bool:
    """Returns whether a row gets the same bits in every pass of this process."""
    return _alike >= Alike.PASSES


def is_on_in_groups() -> bool:
    """Returns whether it also gets them in the passes of sequence-parallel groups."""
    return _alike >= Alike.GROUPS


def use(alike: Alike) -> None:
    """Sets it for the whole process. Linears that are prepared already may keep their kernels."""
    global _alike
    _alike = alike
    with suppress(ImportError):  # where it is not built, torch computes
        from millrace_kernels import _cpu

        _cpu.compute_rows_alike(is_on())


@contextmanager
def switched(alike: Alike) -> Iterator[None]:
    """Sets it in this block."""
    before = _alike
    use(alike)
    try:
        yield
    finally:
        use(before)
