"""Builds tables from measured points."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from millrace.core.cost.operators import Table
from millrace.profiler.measure import Far
from millrace.profiles.eq_1 import rising, rounded


def table_of(points: Mapping[int, float], *, is_rising: bool = False) -> Table:
    """Builds a table through all points, or through the closest rising values (`rising`)."""
    xs = sorted(points)
    ys = [points[x] for x in xs]
    if is_rising:
        ys = rising(ys)
    return Table(xs=tuple(float(x) for x in xs), ys=tuple(rounded(y) for y in ys))


def over_squares(points: Mapping[int, float]) -> Table:
    """Builds a rising table over the squared xs; the last slope is above 0 if any slope is."""
    xs = sorted(points)
    found = dict(zip(xs, rising([max(points[x], 0.0) for x in xs]), strict=True))
    while len(found) > 1 and found[xs[-2]] == found[xs[-1]]:
        del found[xs.pop(-2)]
    return table_of({x * x: seconds for x, seconds in found.items()})


def with_far(attn: Table, far_s: Mapping[Far, float], layers: int) -> Table:
    """Extends `attn`, of one layer over squared tokens, by the slope of `far_s`, of all layers."""
    if not far_s:
        return attn
    pair_s = median(seconds / far.pairs for far, seconds in far_s.items()) / layers
    end = max(far.end for far in far_s) ** 2
    last_s = attn.ys[-1] + pair_s / 2 * (end - attn.xs[-1])
    return Table(xs=(*attn.xs, float(end)), ys=(*attn.ys, rounded(last_s)))
