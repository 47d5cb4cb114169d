"""Fits Tetris Eq. (1), T = a + b L + c C L + d L^2, to measured prefills.

L is the chunk's tokens, C the history's. Linear least squares on relative error (Tetris section 5.1
fits offline by least squares; it does not say how it weighs short prompts against long ones).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from millrace.core.cost.latency import Latency

#: Measured (tokens, seconds) of whole prompts, by tokens.
Points = tuple[tuple[int, float], ...]


def fit(points: Sequence[tuple[int, float]], d: float | None = None) -> tuple[float, float, float]:
    """Returns (a, b, d) of Eq. (1) without history; a term that would be negative is left out.

    points: (tokens, seconds), one or more. d: given where attention was measured by itself; a and b
    are then fitted to the remaining time.
    """
    tokens = np.array([float(point[0]) for point in points])
    seconds = np.array([point[1] for point in points])
    basis = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1) / seconds[:, None]
    wanted = np.ones(len(points)) if d is None else 1.0 - d * basis[:, 2]
    keep = [0, 1, 2][: len(points)] if d is None else [0, 1][: len(points)]
    while keep:
        found = np.linalg.lstsq(basis[:, keep], wanted, rcond=None)[0]
        if (found >= 0).all():
            break
        keep.pop(int(found.argmin()))
    terms = dict(zip(keep, found.tolist(), strict=True)) if keep else {}
    return terms.get(0, 0.0), terms.get(1, 0.0), terms.get(2, 0.0) if d is None else d


def latency(a: float, b: float, d: float, points: Points = ()) -> Latency:
    """Returns Eq. (1) with c = 2 d: a history token meets every token of the chunk, an own token
    half.
    """
    a, b, d = rounded(a), rounded(b), rounded(d)
    return Latency(a=a, b=b, c=2 * d, d=d, points=points)


def rounded(value: float) -> float:
    """Rounds to six digits: more than the data hold, and the same bytes on every machine."""
    return float(f"{value:.6g}")


def history_term(bare: Latency, more: Iterable[tuple[int, int, float]]) -> float:
    """Returns c of Eq. (1), by least squares on relative error of what histories add.

    bare: a, b and d, with c = 0. more: (tokens, history, seconds that the history adds); without
    any, c is 2 d.
    """
    over = product = 0.0
    for tokens, history, more_s in more:
        taken_s = bare.chunk_s(tokens) + more_s
        pairs = tokens * history / taken_s
        over += pairs * more_s / taken_s
        product += pairs * pairs
    return max(over / product, 0.0) if product else 2 * bare.d


def rising(values: Sequence[float]) -> list[float]:
    """Returns the least-squares fit that never falls (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            other, more = blocks.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]
