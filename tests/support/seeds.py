"""Seeds of random runs: a few in the default suite, the others in the slow one."""

from __future__ import annotations

import pytest


def seeds(few: int, most: int) -> list[object]:
    """Returns parameters for `parametrize`: 0 to `most` - 1, of which `few` are not slow."""
    slow = (pytest.param(seed, marks=pytest.mark.slow) for seed in range(few, most))
    return [*range(few), *slow]
