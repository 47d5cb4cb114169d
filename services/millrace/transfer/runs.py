"""Which bytes go where: matching runs of a source and a target region."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """`length[i]` bytes go from `source[i]` to `target[i]`. All int64 [runs], offsets in bytes."""

    source: Offsets
    target: Offsets
    length: Offsets

    @staticmethod
    def of(source: int, target: int, length: int) -> Runs:
        """A single run."""
        return Runs(*(np.array([v], dtype=np.int64) for v in (source, target, length)))

    def __len__(self) -> int:
        return len(self.length)

    @property
    def total_bytes(self) -> int:
        return int(self.length.sum())

    def shifted(self, source: int, target: int) -> Runs:
        """The same runs `source` and `target` bytes further on."""
        return Runs(self.source + source, self.target + target, self.length)

    def coalesced(self) -> Runs:
        """Joins a run to the one before it where both sides are neighbours; order is kept."""
        if len(self) < 2:
            return self
        joins = (self.source[:-1] + self.length[:-1] == self.source[1:]) & (
            self.target[:-1] + self.length[:-1] == self.target[1:]
        )
        firsts = np.flatnonzero(np.concatenate(([True], ~joins)))
        return Runs(self.source[firsts], self.target[firsts], np.add.reduceat(self.length, firsts))

    def grain(self) -> int:
        """The greatest number of bytes that divides every offset and every length."""
        parts = (self.source, self.target, self.length)
        return int(np.gcd.reduce([np.gcd.reduce(p) for p in parts])) if len(self) else 0

    def check_within(self, source_bytes: int, target_bytes: int) -> None:
        """Raises ValueError when a run is empty or leaves either region."""
        if not len(self):
            return
        if int(self.length.min()) <= 0:
            raise ValueError("a run has no bytes")
        for name, start, size in (
            ("source", self.source, source_bytes),
            ("target", self.target, target_bytes),
        ):
            if int(start.min()) < 0 or int((start + self.length).max()) > size:
                raise ValueError(f"a run leaves the {name} region of {size} bytes")


def grains(starts: Offsets, lengths: Offsets, grain: int) -> npt.NDArray[np.int32]:
    """Indices, in units of `grain` bytes, of all grains of the runs, in order."""
    counts = lengths // grain
    ends = np.cumsum(counts)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return (np.repeat(starts // grain, counts) + within).astype(np.int32)
