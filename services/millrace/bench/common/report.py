"""Summarises a load test: percentiles, throughput, goodput, and the share of objectives met.

Definitions. TTFT: from the sending of a request to its first token. TBT: the gap between two events
with tokens of one stream at the client; a stream's mean TBT is the time from its first token to its
last, per further token. E2E: from sending to the end of the stream. A request attains its class's
objectives when it succeeds and its TTFT, its mean TBT and its E2E are within them. Goodput
counts attaining requests per second. (FlowPrefill's goodput, section 6.1, is the largest request
rate at 90 % attainment: run several rates to find it.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from millrace.sim.workload.workload import SloClass
from millrace.tables import table

PERCENTILES = (50, 90, 99)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request as the client saw it. Times are seconds since the test's start.

    `error` is empty on success, else the kind ("http 429", "timeout", ...). `token_times_s` has one
    entry per event with tokens; `output_tokens` is the server's count of generated tokens.
    """

    index: int
    class_name: str
    input_tokens: int
    asked_tokens: int
    due_s: float | None = None
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    ended_s: float = 0.0
    error: str = ""
    detail: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def mean_tbt_s(self) -> float | None:
        """Returns None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    def meets_ttft(self, slo: SloClass) -> bool:
        return not self.error and (slo.ttft_s is None or self.ttft_s <= slo.ttft_s)

    def meets_tbt(self, slo: SloClass) -> bool:
        if self.error:
            return False
        mean = self.mean_tbt_s
        return slo.tbt_s is None or mean is None or mean <= slo.tbt_s

    def meets_e2e(self, slo: SloClass) -> bool:
        return not self.error and (slo.e2e_s is None or self.e2e_s <= slo.e2e_s)

    def meets(self, slo: SloClass) -> bool:
        """Returns whether it succeeded and met all of its objectives."""
        return self.meets_ttft(slo) and self.meets_tbt(slo) and self.meets_e2e(slo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Statistics of values in milliseconds; percentiles by linear interpolation. All zero when
    empty.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, values: Iterable[float]) -> Distribution:
        array = np.fromiter(values, dtype=np.float64) * 1e3
        if not len(array):
            return cls(count=0, mean=0.0, p50=0.0, p90=0.0, p99=0.0, max=0.0)
        p50, p90, p99 = (float(p) for p in np.percentile(array, PERCENTILES))
        return cls(
            count=len(array),
            mean=float(array.mean()),
            p50=p50,
            p90=p90,
            p99=p99,
            max=float(array.max()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """Figures of one objective class, or of all. Attainments are shares of its requests, 0 to 1."""

    requests: int
    succeeded: int
    ttft_attainment: float
    tbt_attainment: float
    e2e_attainment: float
    attainment: float
    goodput_rps: float
    ttft_ms: Distribution
    tbt_ms: Distribution
    mean_tbt_ms: Distribution
    e2e_ms: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of a load test. `wall_s` is from the first request sent to the last stream's end."""

    wall_s: float
    requests: int
    succeeded: int
    request_rate_rps: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    errors: dict[str, int]
    error_examples: dict[str, str]
    short_outputs: int  # succeeded with fewer tokens than asked for
    send_lag_ms: Distribution  # how late the client sent; large values spoil all figures
    total: ClassReport
    classes: dict[str, ClassReport]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(records: Sequence[RequestRecord], classes: Sequence[SloClass]) -> Report:
    """Computes the report of finished requests; each has a class in `classes`."""
    good = [record for record in records if not record.error]
    start_s = min((record.sent_s for record in records), default=0.0)
    wall_s = max((record.ended_s for record in records), default=0.0) - start_s
    per_s = 1.0 / wall_s if wall_s > 0 else 0.0
    slos = {slo.name: slo for slo in classes}
    examples: dict[str, str] = {}
    for record in records:
        if record.error:
            examples.setdefault(record.error, record.detail)
    return Report(
        wall_s=wall_s,
        requests=len(records),
        succeeded=len(good),
        request_rate_rps=len(good) * per_s,
        input_tokens_per_s=sum(record.input_tokens for record in good) * per_s,
        output_tokens_per_s=sum(record.output_tokens for record in good) * per_s,
        errors=dict(Counter(record.error for record in records if record.error).most_common()),
        error_examples=examples,
        short_outputs=sum(record.output_tokens < record.asked_tokens for record in good),
        send_lag_ms=Distribution.of_seconds(
            record.sent_s - record.due_s for record in records if record.due_s is not None
        ),
        total=_class_report(records, slos, per_s),
        classes={
            name: _class_report([r for r in records if r.class_name == name], slos, per_s)
            for name in slos
        },
    )


def _class_report(
    records: Sequence[RequestRecord], slos: dict[str, SloClass], per_s: float
) -> ClassReport:
    good = [record for record in records if not record.error]
    ttft = [record.meets_ttft(slos[record.class_name]) for record in records]
    tbt = [record.meets_tbt(slos[record.class_name]) for record in records]
    e2e = [record.meets_e2e(slos[record.class_name]) for record in records]
    met = sum(record.meets(slos[record.class_name]) for record in records)
    share = 1.0 / max(1, len(records))
    gaps = [np.diff(record.token_times_s) for record in good]
    return ClassReport(
        requests=len(records),
        succeeded=len(good),
        ttft_attainment=sum(ttft) * share,
        tbt_attainment=sum(tbt) * share,
        e2e_attainment=sum(e2e) * share,
        attainment=met * share,
        goodput_rps=met * per_s,
        ttft_ms=Distribution.of_seconds(record.ttft_s for record in good),
        tbt_ms=Distribution.of_seconds(np.concatenate(gaps) if gaps else ()),
        mean_tbt_ms=Distribution.of_seconds(
            mean for record in good if (mean := record.mean_tbt_s) is not None
        ),
        e2e_ms=Distribution.of_seconds(record.e2e_s for record in good),
    )


def print_report(report: Report, classes: Sequence[SloClass], console: Console) -> None:
    """Prints the figures as tables, and errors by kind."""
    console.print(
        f"{report.succeeded} of {report.requests} requests succeeded in {report.wall_s:.1f} s: "
        f"{report.request_rate_rps:.2f} requests/s, {report.input_tokens_per_s:,.0f} input and "
        f"{report.output_tokens_per_s:,.0f} output tokens/s"
    )
    total = report.total
    kinds = {
        "TTFT": total.ttft_ms,
        "TBT": total.tbt_ms,
        "TBT, a stream's mean": total.mean_tbt_ms,
        "E2E": total.e2e_ms,
    }
    latency = table(
        "Milliseconds",
        " | mean | p50 | p90 | p99 | max",
        "{name} | {mean:,.1f} | {p50:,.1f} | {p90:,.1f} | {p99:,.1f} | {max:,.1f}",
        ({"name": name, **asdict(found)} for name, found in kinds.items()),
        left=1,
    )
    console.print(latency)
    by_class = table(
        "Share that met its objectives, and TTFT in ms",
        "class | n | TTFT | met | TBT | met | E2E | met | all | goodput/s | p50 | p99",
        "{name} | {requests} | {ttft} | {ttft_met:.1%} | {tbt} | {tbt_met:.1%} | "
        "{e2e} | {e2e_met:.1%} | {attainment:.1%} | {goodput_rps:.2f} | {ttft_ms[p50]:,.0f} | "
        "{ttft_ms[p99]:,.0f}",
        (_class_row(slo, report.classes[slo.name]) for slo in classes),
        left=1,
        tight=True,
    )
    console.print(by_class)
    for kind, count in report.errors.items():
        console.print(f"[red]{count} x {kind}[/red]  {report.error_examples[kind][:200]}")
    if report.short_outputs:
        console.print(
            f"{report.short_outputs} outputs were shorter than asked for: does the server know "
            "ignore_eos?"
        )
    if report.send_lag_ms.p99 > 10:
        console.print(
            f"[yellow]this client fell behind: requests left up to {report.send_lag_ms.max:.0f} ms "
            "late[/yellow]"
        )


def _class_row(slo: SloClass, found: ClassReport) -> dict[str, Any]:
    return asdict(found) | {
        "name": slo.name,
        "ttft": _objective(slo.ttft_s),
        "ttft_met": None if slo.ttft_s is None else found.ttft_attainment,
        "tbt": _objective(slo.tbt_s),
        "tbt_met": None if slo.tbt_s is None else found.tbt_attainment,
        "e2e": _objective(slo.e2e_s),
        "e2e_met": None if slo.e2e_s is None else found.e2e_attainment,
    }


def _objective(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1e3:g} ms"
