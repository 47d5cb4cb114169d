"""The results of a simulation, collected request by request in memory that does not grow.

TTFT is from arrival to the first token; TBT is a request's mean gap between tokens; E2E from
arrival to the last token. A request attains its objectives when it succeeds with TTFT, TBT and E2E
within them: failures and refusals are misses, in every attainment. Goodput is the rate of attaining
requests over the simulated duration. (FlowPrefill's goodput, section 6.1, is the largest rate at 90
% attainment: `millrace sim sweep` finds it.) Slowdown is TTFT over the time of the prefill alone on
the idle cluster; the wait multiple is the time queued and suspended over the same time.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError, reason_of
from millrace.core.weights import DEFAULT_TENANT
from millrace.sim.results.counters import EngineCounters
from millrace.sim.results.histogram import Distribution, Histogram

#: Where TTFT's distribution is sampled for plots: 0, 1, ... 100 %.
CDF_SHARES = tuple(percent / 100 for percent in range(101))


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request as simulated. Times in seconds; `error` is empty on success, else its kind."""

    index: int
    class_name: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float = 0.0
    tbt_s: float | None = None  # mean gap; None of a single token
    e2e_s: float = 0.0
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    e2e_slo_s: float | None = None
    isolated_s: float = 0.0  # its prefill alone on the idle cluster
    queued_s: float = 0.0  # before its first chunk starts
    suspended_s: float = (
        0.0  # between its first chunk's start and its last one's end, not computing
    )
    longest_suspension_s: float = 0.0
    chunks: int = 0
    sp: int = 0  # largest group
    attempts: int = 1
    tenant: str = DEFAULT_TENANT
    error: str = ""

    @property
    def meets_ttft(self) -> bool:
        """Returns whether the first token was in time; of a request that succeeded."""
        return self.ttft_slo_s is None or self.ttft_s <= self.ttft_slo_s

    @property
    def meets_tbt(self) -> bool:
        slo_s, tbt_s = self.tbt_slo_s, self.tbt_s
        return slo_s is None or tbt_s is None or tbt_s <= slo_s

    @property
    def meets_e2e(self) -> bool:
        return self.e2e_slo_s is None or self.e2e_s <= self.e2e_slo_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """One objective class, or all together. Attainments are shares of its requests, 0 to 1.

    Distributions are of requests that succeeded, in seconds unless they are ratios.
    """

    requests: int
    succeeded: int
    attained: int
    ttft_attainment: float
    tbt_attainment: float
    e2e_attainment: float
    attainment: float
    goodput_rps: float
    ttft_s: Distribution
    tbt_s: Distribution
    e2e_s: Distribution
    ttft_of_slo: Distribution
    slowdown: Distribution
    wait_multiple: Distribution
    queued_s: Distribution
    suspended_s: Distribution
    longest_suspension_s: Distribution
    ttft_quantiles_s: tuple[float, ...]  # at `CDF_SHARES`


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run over `duration_s` of simulated time.

    Wall time is left out, so that equal seeds give equal documents.
    """

    duration_s: float
    requests: int
    succeeded: int
    request_rate_rps: float  # finished per second
    input_tokens_per_s: float
    output_tokens_per_s: float
    errors: dict[str, int]
    retried: int  # requests with more than one attempt
    mean_chunks: float
    sp_degrees: dict[str, int]  # largest group -> requests
    total: ClassReport
    classes: dict[str, ClassReport]
    engine: EngineCounters | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns plain dicts and lists, always in the same order."""
        return asdict(self)


#: The distributions of fields that every record has, and all distributions.
_MEASURED = ("ttft_s", "e2e_s", "queued_s", "suspended_s", "longest_suspension_s")
_DISTRIBUTIONS = (*_MEASURED, "tbt_s", "ttft_of_slo", "slowdown", "wait_multiple")

#: The counts of requests.
_COUNTS = ("requests", "succeeded", "ttft_met", "tbt_met", "e2e_met", "all_met")


class _ClassStats:
    """Running figures of one class."""

    __slots__ = (*_COUNTS, "spreads")

    def __init__(self) -> None:
        self.requests = self.succeeded = self.all_met = 0
        self.ttft_met = self.tbt_met = self.e2e_met = 0
        self.spreads = {name: Histogram() for name in _DISTRIBUTIONS}

    def add(self, record: RequestRecord) -> bool:
        """Counts a request; true when it attained its objectives."""
        self.requests += 1
        if record.error:
            return False
        self.succeeded += 1
        self._spread(record)
        ttft_met, tbt_met, e2e_met = record.meets_ttft, record.meets_tbt, record.meets_e2e
        self.ttft_met += ttft_met
        self.tbt_met += tbt_met
        self.e2e_met += e2e_met
        all_met = ttft_met and tbt_met and e2e_met
        self.all_met += all_met
        return all_met

    def _spread(self, record: RequestRecord) -> None:
        spreads = self.spreads
        for name in _MEASURED:
            spreads[name].add(getattr(record, name))
        if record.tbt_s is not None:
            spreads["tbt_s"].add(record.tbt_s)
        if record.ttft_slo_s:
            spreads["ttft_of_slo"].add(record.ttft_s / record.ttft_slo_s)
        if record.isolated_s > 0:
            waited_s = record.queued_s + record.suspended_s
            spreads["slowdown"].add(record.ttft_s / record.isolated_s)
            spreads["wait_multiple"].add(waited_s / record.isolated_s)

    def merge(self, other: _ClassStats) -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _DISTRIBUTIONS:
            self.spreads[name].merge(other.spreads[name])

    def report(self, per_s: float) -> ClassReport:
        requests = max(1, self.requests)
        return ClassReport(
            requests=self.requests,
            succeeded=self.succeeded,
            attained=self.all_met,
            ttft_attainment=self.ttft_met / requests,
            tbt_attainment=self.tbt_met / requests,
            e2e_attainment=self.e2e_met / requests,
            attainment=self.all_met / requests,
            goodput_rps=self.all_met * per_s,
            ttft_quantiles_s=tuple(self.spreads["ttft_s"].quantiles(CDF_SHARES)),
            **{name: spread.distribution() for name, spread in self.spreads.items()},
        )


#: A list of numbers, which `write_json` puts on one line.
_NUMBERS = re.compile(r"\[\s+[-+.\de]+(,\s+[-+.\de]+)*\s+\]")


class Collector:
    """Takes one record per request, in any order, and keeps sums and histograms only.

    `sink` gets every record as it comes; a report's figures don't depend on it.
    """

    def __init__(self, sink: Callable[[RequestRecord], None] | None = None) -> None:
        self.requests = 0
        self.missed = 0  # did not attain their objectives, failures included
        self._sink = sink
        self._classes: dict[str, _ClassStats] = {}
        self._errors: Counter[str] = Counter()
        self._degrees: Counter[int] = Counter()
        self._input_tokens = self._output_tokens = self._chunks = self._retried = 0

    def add(self, record: RequestRecord) -> None:
        stats = self._classes.get(record.class_name)
        if stats is None:
            stats = self._classes[record.class_name] = _ClassStats()
        self.requests += 1
        self.missed += not stats.add(record)
        self._retried += record.attempts > 1
        if record.error:
            self._errors[record.error] += 1
        else:
            self._degrees[record.sp] += 1
            self._chunks += record.chunks
            self._input_tokens += record.input_tokens
            self._output_tokens += record.output_tokens
        if self._sink is not None:
            self._sink(record)

    def report(self, duration_s: float, engine: EngineCounters | None = None) -> Report:
        """Returns the figures so far, over `duration_s` of simulated time."""
        per_s = 1.0 / duration_s if duration_s > 0 else 0.0
        total = _ClassStats()
        for _, stats in sorted(self._classes.items()):
            total.merge(stats)
        return Report(
            duration_s=duration_s,
            requests=total.requests,
            succeeded=total.succeeded,
            request_rate_rps=total.succeeded * per_s,
            input_tokens_per_s=self._input_tokens * per_s,
            output_tokens_per_s=self._output_tokens * per_s,
            errors=dict(sorted(self._errors.items())),
            retried=self._retried,
            mean_chunks=self._chunks / max(1, total.succeeded),
            sp_degrees={str(sp): count for sp, count in sorted(self._degrees.items())},
            total=total.report(per_s),
            classes={name: stats.report(per_s) for name, stats in sorted(self._classes.items())},
            engine=engine,
        )


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes a document; floats as Python prints them. Raises ConfigError for a bad path."""
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    text = _NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {reason_of(error)}") from error
