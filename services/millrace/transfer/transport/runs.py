"""Matches byte runs of a source region with byte runs of a target region."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]


class Runs:
    """Byte runs: `length[i]` bytes go from `source[i]` to `target[i]`. All int64 [runs], in bytes.

    Immutable. The layers of a chunk have the same runs at other offsets: shifted runs share the
    cached facts of the runs they came from.
    """

    __slots__ = ("_base", "_grain", "_indices", "_shift", "_span", "length", "source", "target")

    def __init__(self, source: Offsets, target: Offsets, length: Offsets) -> None:
        self.source = source
        self.target = target
        self.length = length
        self._base: Runs | None = None
        self._shift = (0, 0)
        self._grain: int | None = None
        self._span: tuple[int, int, int, int, int, int] | None = None
        self._indices: tuple[int, Offsets, Offsets] | None = None

    @staticmethod
    def of(source: int, target: int, length: int) -> Runs:
        """Makes a single run."""
        return Runs(*(np.array([v], dtype=np.int64) for v in (source, target, length)))

    @staticmethod
    def joined(pieces: Sequence[Runs]) -> Runs:
        """Joins all runs of the pieces, in order."""
        if len(pieces) == 1:
            return pieces[0]
        return Runs(
            np.concatenate([piece.source for piece in pieces]),
            np.concatenate([piece.target for piece in pieces]),
            np.concatenate([piece.length for piece in pieces]),
        )

    def __len__(self) -> int:
        return len(self.length)

    @property
    def total_bytes(self) -> int:
        return self._facts()[5]

    def shifted(self, source: int, target: int) -> Runs:
        """Returns the same runs, shifted by `source` and `target` bytes."""
        moved = Runs(self.source + source, self.target + target, self.length)
        moved._base = self
        moved._shift = (source, target)
        return moved

    def repeated(self, sources: Sequence[int], targets: Sequence[int]) -> Runs:
        """Returns all runs once per pair of shifts, in bytes, in their order."""
        by_source, by_target = (np.asarray(shifts, dtype=np.int64) for shifts in (sources, targets))
        return Runs(
            np.add.outer(by_source, self.source).ravel(),
            np.add.outer(by_target, self.target).ravel(),
            np.tile(self.length, len(by_source)),
        )

    def coalesced(self) -> Runs:
        """Joins a run to the previous run where both sides are neighbours; the order is kept."""
        if len(self) < 2:
            return self
        joins = (self.source[:-1] + self.length[:-1] == self.source[1:]) & (
            self.target[:-1] + self.length[:-1] == self.target[1:]
        )
        firsts = np.flatnonzero(np.concatenate(([True], ~joins)))
        return Runs(self.source[firsts], self.target[firsts], np.add.reduceat(self.length, firsts))

    def grain(self) -> int:
        """Returns a number of bytes that divides every offset and every length; 0 without runs.

        It is the greatest such number, except for shifted runs: theirs divides the number of their
        origin.
        """
        if self._grain is None:
            if self._base is not None:
                self._grain = math.gcd(self._base.grain(), *self._shift)
            else:
                parts = (self.source, self.target, self.length)
                self._grain = math.gcd(*(int(np.gcd.reduce(part)) for part in parts))
        return self._grain

    def indices(self, grain: int) -> tuple[Offsets, Offsets]:
        """Numbers all grains of source and target, in units of `grain` bytes, in order."""
        if self._indices is None or self._indices[0] != grain:
            base = self._base
            if base is not None and base.grain() == grain:
                source, target = base.indices(grain)
                by_source, by_target = (int(shift // grain) for shift in self._shift)
                self._indices = (grain, source + by_source, target + by_target)
            else:
                within = _within(self.length // grain)
                self._indices = (
                    grain,
                    _numbers(self.source // grain, self.length // grain, within),
                    _numbers(self.target // grain, self.length // grain, within),
                )
        return self._indices[1:]

    def check_within(self, source_bytes: int, target_bytes: int) -> None:
        """Raises ValueError when a run is empty or leaves either region."""
        if not len(self):
            return
        shortest, source, source_end, target, target_end, _ = self._facts()
        if shortest <= 0:
            raise ValueError("a run has no bytes")
        for name, start, end, size in (
            ("source", source, source_end, source_bytes),
            ("target", target, target_end, target_bytes),
        ):
            if start < 0 or end > size:
                raise ValueError(f"a run leaves the {name} region of {size} bytes")

    def _facts(self) -> tuple[int, int, int, int, int, int]:
        """Returns shortest length, least source and its end, least target and its end, sum of
        lengths.
        """
        if self._span is None:
            if self._base is not None:
                shortest, source, source_end, target, target_end, total = self._base._facts()
                by, to = self._shift
                ends = (source_end + by, target + to, target_end + to)
                self._span = (shortest, source + by, *ends, total)
            elif len(self):
                self._span = (
                    int(self.length.min()),
                    int(self.source.min()),
                    int((self.source + self.length).max()),
                    int(self.target.min()),
                    int((self.target + self.length).max()),
                    int(self.length.sum()),
                )
            else:
                self._span = (0, 0, 0, 0, 0, 0)
        return self._span


def _within(counts: Offsets) -> Offsets:
    """Returns the number of each grain within its run."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)


def _numbers(starts: Offsets, counts: Offsets, within: Offsets) -> Offsets:
    return np.repeat(starts, counts) + within
