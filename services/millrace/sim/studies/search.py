"""Finds the largest load that a system carries, by bisection."""

from __future__ import annotations

import math
from collections.abc import Generator

#: The search gives up this far above and below its start.
REACH = 4096.0


def largest_load(
    start: float, tolerance: float, step: float = 2.0
) -> Generator[float, bool, float | None]:
    """Yields loads to try and is sent whether each was carried; returns the largest carried load.

    Multiplies or divides by `step` from `start` until one load is carried and `step` times it is
    not, then bisects (geometrically) until the two are within a factor of 1 + `tolerance`. The
    result was itself tried and carried, and a load at most that factor above it was not. None when
    no load from `start` / 4096 up is carried; when all are carried, the last load tried.

    Attainment need not fall steadily with load (it comes of one draw of arrivals): then the result
    is one of the crossings.
    """
    carried: float | None = None
    failed: float | None = None
    load = start
    while carried is None or failed is None:
        if not start / REACH <= load <= start * REACH:
            return carried
        if (yield load):
            carried, load = load, load * step
        else:
            failed, load = load, load / step
    while failed > carried * (1 + tolerance):
        middle = math.sqrt(carried * failed)
        if (yield middle):
            carried = middle
        else:
            failed = middle
    return carried
