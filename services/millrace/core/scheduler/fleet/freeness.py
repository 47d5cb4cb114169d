"""Ranks decode instances for a request: freeness with virtual usage (Tetris section 5.2).

    freeness = (free slots - virtual usage) / active batch size

A slot is room for one token's keys and values, so that pools with different page sizes compare.
Free slots are those that no decoding request holds; virtual usage is the slots of requests whose
cache is still on its way (placed, prefilling or transferring); the batch size counts sequences.

Deviations. A request holds the pages of its prompt and whole answer from its placement on, so a
batch never runs out of memory: the slots of a decoding request include the tokens it has yet to
emit, and no update per emitted token is needed. (Where `decode_reserve` is "grow" it books fewer,
and free slots are at most those that the instance's last heartbeat reported.) An empty batch counts
as one, since the paper divides by zero there. Equal instances are ordered by id, so that the same
input always gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar


class DecodeRoom(Protocol):
    """The fields of a decode instance that placement reads."""

    @property
    def id(self) -> str: ...
    @property
    def freeness(self) -> float:
        """Returns the slots that a new request may take, per sequence of the batch."""


Room = TypeVar("Room", bound=DecodeRoom)


def freeness(free_slots: int, virtual_slots: int, batch_size: int) -> float:
    """Returns the slots that a new request may take, per sequence of the batch; higher is freer."""
    return (free_slots - virtual_slots) / max(batch_size, 1)


def freest(
    instances: Iterable[Room], able: Callable[[Room], bool] = lambda instance: True
) -> Room | None:
    """The able instance with the highest freeness, the least id among equals; None without any.

    `able` is asked only of an instance that is freer than all able ones before it.
    """
    best: Room | None = None
    best_rank = 0.0
    for instance in instances:
        rank = instance.freeness
        if best is not None and (rank < best_rank or (rank == best_rank and best.id < instance.id)):
            continue
        if able(instance):
            best, best_rank = instance, rank
    return best
