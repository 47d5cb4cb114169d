"""Compares two systems on the same requests, request by request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from millrace.core.errors import ConfigError
from millrace.sim.results.report import Report, RequestRecord
from millrace.sim.scenario import Progress, Scenario, Watch, simulate

#: TTFTs that differ by less than this share count as equal.
EQUAL_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One request in both systems, A first. A TTFT is None where the request failed."""

    index: int
    class_name: str
    input_tokens: int
    ttft_s: tuple[float | None, float | None]
    met: tuple[bool, bool]  # all its objectives

    @property
    def gain_s(self) -> float:
        """Returns by how many seconds B's first token is earlier; 0 where either has none."""
        a_s, b_s = self.ttft_s
        return 0.0 if a_s is None or b_s is None else a_s - b_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassComparison:
    """What changes for one class from A to B. Counts are of requests."""

    requests: int
    both_met: int
    only_a_met: int
    only_b_met: int
    earlier_in_a: int  # first tokens, by more than `EQUAL_SHARE`
    earlier_in_b: int
    median_ratio: float | None  # of B's TTFT to A's; None where no request has both


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two systems' reports, and their requests in pairs, in order of arrival."""

    reports: tuple[Report, Report]
    classes: dict[str, ClassComparison]
    pairs: tuple[Pair, ...]

    def largest(self, count: int) -> list[Pair]:
        """Returns the pairs whose TTFTs differ most, in seconds."""
        return sorted(self.pairs, key=lambda pair: -abs(pair.gain_s))[:count]


def compare(
    a: Scenario,
    b: Scenario,
    progress: Progress | None = None,
    boards: tuple[Callable[[dict[str, Any]], None] | None, ...] = (None, None),
) -> Comparison:
    """Simulates both on the same traffic; `boards` get the lines of each one's board.

    Raises ConfigError if the traffic differs, which would compare nothing.
    """
    if a.traffic != b.traffic:
        raise ConfigError("the two systems have different traffic: nothing can be compared")
    runs: list[tuple[Report, dict[int, RequestRecord]]] = []
    for scenario, board in zip((a, b), boards, strict=True):
        records: dict[int, RequestRecord] = {}

        def keep(record: RequestRecord, records: dict[int, RequestRecord] = records) -> None:
            records[record.index] = record

        runs.append((simulate(scenario, Watch(sink=keep, board=board, progress=progress)), records))
    (a_report, a_records), (b_report, b_records) = runs
    pairs = [_pair(a_records[index], b_records[index]) for index in sorted(a_records)]
    names = sorted({pair.class_name for pair in pairs})
    classes = {name: _of_class(pair for pair in pairs if pair.class_name == name) for name in names}
    return Comparison(reports=(a_report, b_report), classes=classes, pairs=tuple(pairs))


def _pair(a: RequestRecord, b: RequestRecord) -> Pair:
    return Pair(
        index=a.index,
        class_name=a.class_name,
        input_tokens=a.input_tokens,
        ttft_s=(None if a.error else a.ttft_s, None if b.error else b.ttft_s),
        met=(_met(a), _met(b)),
    )


def _met(record: RequestRecord) -> bool:
    return not record.error and record.meets_ttft and record.meets_tbt and record.meets_e2e


def _of_class(pairs: Iterable[Pair]) -> ClassComparison:
    found = list(pairs)
    both = [(a, b) for a, b in (pair.ttft_s for pair in found) if a is not None and b is not None]
    ratios = [b / a for a, b in both if a > 0.0]
    return ClassComparison(
        requests=len(found),
        both_met=sum(pair.met == (True, True) for pair in found),
        only_a_met=sum(pair.met == (True, False) for pair in found),
        only_b_met=sum(pair.met == (False, True) for pair in found),
        earlier_in_a=sum(a < b * (1 - EQUAL_SHARE) for a, b in both),
        earlier_in_b=sum(b < a * (1 - EQUAL_SHARE) for a, b in both),
        median_ratio=median(ratios) if ratios else None,
    )
