"""Counts arrived data: every (layer, head, token) of a range exactly once."""

from __future__ import annotations

from bisect import bisect_left

from millrace.core.kv.layout import KvLayout


class CoverageError(Exception):
    """A part arrived twice, or lies outside the request."""


class Coverage:
    """The union of one request's parts that have landed, over the layers and heads of `layout`.

    A part is a rectangle of heads x tokens of one layer. Neighbouring token ranges of the same
    heads are joined, so a chunked prompt needs a few intervals per layer, not one per part.
    """

    def __init__(self, layout: KvLayout, num_tokens: int, start_token: int = 0) -> None:
        """Expects the tokens ``[start_token, start_token + num_tokens)``."""
        self._layout = layout
        self._start = start_token
        self._end = start_token + num_tokens
        # layer of the pool -> (first head, heads) -> ascending disjoint [start, end) of tokens
        self._landed: list[dict[tuple[int, int], list[tuple[int, int]]]] = [
            {} for _ in range(layout.num_layers)
        ]
        self._missing = self._cells(num_tokens)
        self._prefixes = [start_token] * layout.num_layers  # where each layer's first gap begins

    @property
    def prefix_tokens(self) -> int:
        """Returns how many first tokens of the range have landed in all layers and heads."""
        return min(self._prefixes) - self._start

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def add(self, layer: int, heads: tuple[int, int], start: int, count: int) -> None:
        """Marks tokens ``[start, start + count)`` of `heads` (first, count) of a layer as landed.

        Raises CoverageError, and marks nothing, for a part that overlaps a landed part or lies
        outside the receiver's range.
        """
        self.check(layer, heads, start, count)
        first, number = heads
        end = start + count
        at_layer = layer - self._layout.layer_start
        landed = self._landed[at_layer]
        for (other, others), ranges in landed.items():
            if other < first + number and first < other + others:
                at = bisect_left(ranges, (end,))
                if at and ranges[at - 1][1] > start:
                    raise CoverageError(f"{_part(layer, heads, start, end)} arrived twice")
        _insert(landed.setdefault(heads, []), start, end)
        self._missing -= number * count
        if start <= self._prefixes[at_layer] < end:
            self._prefixes[at_layer] = self._prefix(landed)

    def check(self, layer: int, heads: tuple[int, int], start: int, count: int) -> None:
        """Raises CoverageError for a part outside the receiver's range."""
        first, number = heads
        end = start + count
        if not (
            layer in self._layout.layers
            and self._layout.head_start <= first < first + number <= self._layout.head_end
            and self._start <= start < end <= self._end
        ):
            raise CoverageError(f"{_part(layer, heads, start, end)} lies outside the request")

    def keep(self, tokens: int) -> None:
        """Keeps the first `tokens` of the range as landed; all others are expected again."""
        end = self._start + tokens
        whole = (self._layout.head_start, self._layout.head_count)
        for layer in range(self._layout.num_layers):
            self._landed[layer] = {whole: [(self._start, end)]} if tokens else {}
            self._prefixes[layer] = end
        self._missing = self._cells(self._end - end)

    def missing(self) -> str:
        """Says what has not landed yet: the share in percent, and the first gap."""
        num_tokens = self._end - self._start
        total = self._cells(num_tokens)
        share = 100 * self._missing / total if total else 0.0
        for layer, landed in zip(self._layout.layers, self._landed, strict=True):
            tokens = sum(n * (e - s) for (_, n), ranges in landed.items() for s, e in ranges)
            if tokens < self._layout.head_count * num_tokens:
                return f"{share:.1f} % of its KV is missing, first in layer {layer}"
        return "nothing is missing"

    def _cells(self, tokens: int) -> int:
        return self._layout.num_layers * self._layout.head_count * tokens

    def _prefix(self, landed: dict[tuple[int, int], list[tuple[int, int]]]) -> int:
        """Returns where the first gap of a layer begins, over all heads."""
        edges = {self._layout.head_start, *(h for first, n in landed for h in (first, first + n))}
        prefixes = []
        for head in edges - {self._layout.head_end}:  # equal ranges up to the next edge
            ranges = sorted(
                r
                for (first, n), found in landed.items()
                if first <= head < first + n
                for r in found
            )
            at = self._start
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
