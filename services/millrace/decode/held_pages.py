"""Records the pages that a request holds: shared by its choices, and per choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class HeldPages:
    """The pages that all choices of a request share, and the pages of each choice, in token order.

    The prompt's last, partly filled page belongs to choice 0; each other choice has its own page
    for a copy.
    """

    shared: list[int] = field(default_factory=list)  # filled by the prompt alone
    own: dict[int, list[int]] = field(default_factory=dict)  # choice -> the pages after these

    @staticmethod
    def of(pages: Iterable[int], shared: int, own: Mapping[int, int]) -> HeldPages:
        """Splits `pages`: first `shared` shared pages, then `own[choice]` pages per choice."""
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
        """Lists the pages of a choice in token order, the shared pages first."""
        return self.shared + self.own[choice]
