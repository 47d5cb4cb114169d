"""Arithmetic on counts."""

from __future__ import annotations


def ceil_div(count: int, size: int) -> int:
    """Returns how many groups of `size` hold `count`: the quotient, rounded up."""
    return -(-count // size)
