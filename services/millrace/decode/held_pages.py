"""Which pages a request holds, and what for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class HeldPages:
    """The pages of a prompt that its choices share, and those of each choice alone, in token order.

    The prompt's last, partly filled page is choice 0's: the others have a page of their own in its
    place, for its copy.
    """

    shared: list[int] = field(default_factory=list)  # filled by the prompt alone
    own: dict[int, list[int]] = field(default_factory=dict)  # choice -> its pages behind those

    @staticmethod
    def of(pages: Iterable[int], shared: int, own: Mapping[int, int]) -> HeldPages:
        """Deals pages out: so many shared, and then so many to each choice."""
        rest = iter(pages)
        held = HeldPages(shared=[next(rest) for _ in range(shared)])
        for choice, count in own.items():
            held.own[choice] = [next(rest) for _ in range(count)]
        return held

    def __len__(self) -> int:
        return len(self.shared) + sum(map(len, self.own.values()))

    def all(self) -> list[int]:
        return [*self.shared, *(page for pages in self.own.values() for page in pages)]

    def of_choice(self, choice: int) -> list[int]:
        """In token order, those of the prompt first."""
        return self.shared + self.own[choice]
