"""Names one run of a process."""

from __future__ import annotations

from typing import NamedTuple


class Incarnation(NamedTuple):
    """One run of one process. A restart has the same id and a greater generation, unless the wall
    clock was set back.
    """

    id: str
    generation: int

    def __str__(self) -> str:
        return f"{self.id} (generation {self.generation})"
