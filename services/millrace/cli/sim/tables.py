"""Prints a simulation's figures on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from millrace.sim.results.counters import EngineCounters
from millrace.sim.results.report import Report
from millrace.sim.studies.rate_profile import RateRow
from millrace.sim.studies.sweep import SweepOptions, SystemResult
from millrace.tables import as_text, table

#: The rows of a run's distributions: name, field, format.
_DISTRIBUTIONS = (
    ("TTFT, ms", "ttft_s", "ms,.0f"),
    ("TBT, a request's mean, ms", "tbt_s", "ms,.1f"),
    ("E2E, ms", "e2e_s", "ms,.0f"),
    ("TTFT / prefill alone", "slowdown", ",.2f"),
    ("waiting / prefill alone", "wait_multiple", ",.2f"),
    ("longest suspension, ms", "longest_suspension_s", "ms,.0f"),
)


def print_report(report: Report, console: Console) -> None:
    """Prints one run: latencies, classes, the engine's counters, errors by kind."""
    console.print(
        f"{report.succeeded} of {report.requests} requests succeeded in {report.duration_s:,.1f} "
        f"simulated s: {report.request_rate_rps:.2f} requests/s, "
        f"{report.input_tokens_per_s:,.0f} input and {report.output_tokens_per_s:,.0f} output "
        "tokens/s"
    )
    latencies = []
    for name, field, form in _DISTRIBUTIONS:
        found = asdict(getattr(report.total, field))
        latencies.append({"name": name, **{key: as_text(x, form) for key, x in found.items()}})
    console.print(
        table(
            "All that succeeded",
            " | mean | p50 | p90 | p99 | max",
            "{name} | {mean} | {p50} | {p90} | {p99} | {max}",
            latencies,
            left=1,
        )
    )
    rows = {"all": report.total} | report.classes if len(report.classes) > 1 else report.classes
    console.print(
        table(
            "Share that met its objectives",
            "class | n | TTFT met | TBT met | E2E met | all | goodput/s | TTFT p50 ms | p99 ms",
            "{name} | {requests:,} | {ttft_attainment:.1%} | {tbt_attainment:.1%} | "
            "{e2e_attainment:.1%} | {attainment:.1%} | {goodput_rps:.2f} | {ttft_s[p50]:ms,.0f} | "
            "{ttft_s[p99]:ms,.0f}",
            ({"name": name, **asdict(found)} for name, found in rows.items()),
            left=1,
        )
    )
    if report.engine is not None:
        console.print(_engine(report.engine, report.requests))
    for kind, count in report.errors.items():
        console.print(f"[red]{count} x {kind}[/red]")


def print_sweep(
    found: Sequence[SystemResult], options: SweepOptions, console: Console, *, is_replayed: bool
) -> None:
    """Prints one line per system: its edge and the TTFT there; then attainment at the points.

    is_replayed: a rate is the scale of a trace's own.
    """
    load = "rate scale" if is_replayed else "rate 1/s"
    axis = "SLO scale" if options.axis == "slo-scale" else load
    if options.search:
        word = "Smallest SLO scale" if options.axis == "slo-scale" else "Largest rate"
        edges = table(
            f"{word} that keeps {options.goal:.0%} attainment",
            f"system | {axis} | attained | goodput/s | TTFT p50 ms | p99 ms",
            "{name} | {edge} | {attainment?:.1%} | {goodput_rps?:.2f} | {p50?:ms,.0f} | "
            "{p99?:ms,.0f}",
            map(_edge, found),
            left=1,
        )
        console.print(edges)
    if options.points:
        attained = table(
            f"Attainment by {axis}",
            " | ".join(["system", *(f"{value:g}" for value in options.points)]),
            " | ".join(["{system}", *(f"{{{n}:.1%}}" for n in range(len(options.points)))]),
            ({"system": one.name, **_numbered(_attained(one, options))} for one in found),
            left=1,
        )
        console.print(attained)


def print_rates(rows: Sequence[RateRow], console: Console) -> None:
    """Prints one line per arrival rate: its best improvement rate, and the TTFT of each rate."""
    rates = list(rows[0].mean_ttft_s)
    shown = sorted({rates[0], rates[len(rates) // 2], rates[-1]})
    made = table(
        "Best improvement rate",
        " | ".join(["arrivals/s | best | mean TTFT s", *(f"with {rate:g}" for rate in shown)]),
        "{arrivals_rps:g} | {best:g}" + "".join(f" | {{{n}:.3f}}" for n in range(1 + len(shown))),
        (
            asdict(row) | _numbered(row.mean_ttft_s[rate] for rate in (row.best, *shown))
            for row in rows
        ),
        left=1,
    )
    console.print(made)


def _attained(one: SystemResult, options: SweepOptions) -> list[float]:
    by_value = dict(one.curve)
    return [by_value[value].total.attainment for value in options.points]


def _numbered(values: Iterable[float]) -> dict[str, float]:
    return {str(number): value for number, value in enumerate(values)}


def _edge(result: SystemResult) -> dict[str, Any]:
    if result.edge is None or result.at_edge is None:
        return {"name": result.name, "edge": "none"}
    total = asdict(result.at_edge.total)
    return {"name": result.name, "edge": f"{result.edge:.4g}", **total, **total["ttft_s"]}


def _engine(found: EngineCounters, requests: int) -> str:
    each = 1.0 / max(1, requests)
    busy = ", ".join(f"{pool} {share:.0%}" for pool, share in found.busy_share.items())
    return (
        f"busy: {busy}. A request: {found.rounds * each:.2f} rounds, "
        f"{found.commands * each:.2f} commands, {found.chunks * each:.2f} chunks, "
        f"{found.preemptions * each:.2f} preemptions (blocking p50 {1e3 * found.blocking_s.p50:.2f}"
        f", max {1e3 * found.blocking_s.max:.2f} ms)"
    )
