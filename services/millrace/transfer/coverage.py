"""Accounting of what arrived: every (layer, head, token) of a prompt exactly once."""

from __future__ import annotations

from bisect import bisect_left

from millrace.core.kv_layout import KvLayout


class CoverageError(Exception):
    """A part arrived twice, or lies outside the request."""


class Coverage:
    """Union of the parts of one request that have landed.

    A part is a rectangle of heads x tokens of one layer. Neighbouring token ranges of the same
    heads are joined, so that a chunked prompt needs a few intervals a layer, not one a part.
    """

    def __init__(self, layout: KvLayout, prompt_tokens: int) -> None:
        self._layout = layout
        self._prompt_tokens = prompt_tokens
        # layer -> (first head, heads) -> ascending disjoint [start, end) of tokens
        self._landed: list[dict[tuple[int, int], list[tuple[int, int]]]] = [
            {} for _ in range(layout.num_layers)
        ]
        self._missing = layout.num_layers * layout.head_count * prompt_tokens
        self._prefixes = [0] * layout.num_layers

    @property
    def prefix_tokens(self) -> int:
        """How many first tokens have landed in all layers and heads."""
        return min(self._prefixes)

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def add(self, layer: int, heads: tuple[int, int], start: int, count: int) -> None:
        """Marks tokens ``[start, start + count)`` of `heads` (first, count) of a layer as landed.

        Raises CoverageError, and marks nothing, for a part that overlaps one that landed before or
        is outside of what the receiver holds.
        """
        first, number = heads
        end = start + count
        if not (
            0 <= layer < self._layout.num_layers
            and self._layout.head_start <= first < first + number <= self._layout.head_end
            and 0 <= start < end <= self._prompt_tokens
        ):
            raise CoverageError(f"{_part(layer, heads, start, end)} lies outside the request")
        for (other, others), ranges in self._landed[layer].items():
            if other < first + number and first < other + others:
                at = bisect_left(ranges, (end,))
                if at and ranges[at - 1][1] > start:
                    raise CoverageError(f"{_part(layer, heads, start, end)} arrived twice")
        _insert(self._landed[layer].setdefault(heads, []), start, end)
        self._missing -= number * count
        if start <= self._prefixes[layer] < end:
            self._prefixes[layer] = self._prefix(layer)

    def keep(self, tokens: int) -> None:
        """The first `tokens` stay, which must have landed; all others are expected anew."""
        whole = (self._layout.head_start, self._layout.head_count)
        for layer in range(self._layout.num_layers):
            self._landed[layer] = {whole: [(0, tokens)]} if tokens else {}
            self._prefixes[layer] = tokens
        rest = self._prompt_tokens - tokens
        self._missing = self._layout.num_layers * self._layout.head_count * rest

    def missing(self) -> str:
        """Says what has not landed yet: how much, and the first gap."""
        total = self._layout.num_layers * self._layout.head_count * self._prompt_tokens
        share = 100 * self._missing / total if total else 0.0
        for layer, landed in enumerate(self._landed):
            tokens = sum(n * (e - s) for (_, n), ranges in landed.items() for s, e in ranges)
            if tokens < self._layout.head_count * self._prompt_tokens:
                return f"{share:.1f} % of its KV is missing, first in layer {layer}"
        return "nothing is missing"

    def _prefix(self, layer: int) -> int:
        """First tokens of a layer that have landed in all heads."""
        landed = self._landed[layer]
        edges = {self._layout.head_start, *(h for first, n in landed for h in (first, first + n))}
        prefixes = []
        for head in edges - {self._layout.head_end}:  # heads between two edges are all alike
            ranges = sorted(
                r
                for (first, n), found in landed.items()
                if first <= head < first + n
                for r in found
            )
            at = 0
            for start, end in ranges:
                if start != at:
                    break
                at = end
            prefixes.append(at)
        return min(prefixes)


def _part(layer: int, heads: tuple[int, int], start: int, end: int) -> str:
    return f"layer {layer}, heads {heads[0]}..{heads[0] + heads[1] - 1}, tokens {start}..{end - 1}"


def _insert(ranges: list[tuple[int, int]], start: int, end: int) -> None:
    at = bisect_left(ranges, (start,))
    if at < len(ranges) and ranges[at][0] == end:
        end = ranges.pop(at)[1]
    if at and ranges[at - 1][1] == start:
        at -= 1
        start = ranges.pop(at)[0]
    ranges.insert(at, (start, end))
