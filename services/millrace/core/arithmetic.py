"""Arithmetic on counts."""

from __future__ import annotations


def ceil_div(count: int, size: int) -> int:
    """How many groups of `size` hold `count`: the quotient, rounded up."""
    return -(-count // size)
