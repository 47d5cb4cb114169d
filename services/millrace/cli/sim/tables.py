"""Prints a simulation's figures on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from millrace.sim.results.counters import EngineCounters
from millrace.sim.results.histogram import Distribution
from millrace.sim.results.report import ClassReport, Report
from millrace.sim.studies.rate_profile import RateRow
from millrace.sim.studies.sweep import SweepOptions, SystemResult


def print_report(report: Report, console: Console) -> None:
    """Prints one run: latencies, classes, the engine's counters, errors by kind."""
    console.print(
        f"{report.succeeded} of {report.requests} requests succeeded in {report.duration_s:,.1f} "
        f"simulated s: {report.request_rate_rps:.2f} requests/s, "
        f"{report.input_tokens_per_s:,.0f} input and {report.output_tokens_per_s:,.0f} output "
        "tokens/s"
    )
    console.print(_latencies(report.total))
    console.print(_classes(report))
    if report.engine is not None:
        console.print(_engine(report.engine, report.requests))
    for kind, count in report.errors.items():
        console.print(f"[red]{count} x {kind}[/red]")


def print_sweep(found: Sequence[SystemResult], options: SweepOptions, console: Console) -> None:
    """Prints one line per system: its edge and the TTFT there; then attainment at the points."""
    if options.search:
        word = "Smallest SLO scale" if options.axis == "slo-scale" else "Largest rate"
        table = _table(f"{word} that keeps {options.goal:.0%} attainment", "system")
        for heading in ("edge", "attained", "goodput/s", "TTFT p50 ms", "p99 ms"):
            table.add_column(heading, justify="right")
        for result in found:
            table.add_row(result.name, *_edge(result))
        console.print(table)
    if options.points:
        table = _table(f"Attainment by {options.axis}", "system")
        for value in options.points:
            table.add_column(f"{value:g}", justify="right", no_wrap=True)
        for result in found:
            by_value = {value: report.total.attainment for value, report in result.curve}
            table.add_row(result.name, *(f"{by_value[v]:.1%}" for v in options.points))
        console.print(table)


def print_rates(rows: Sequence[RateRow], console: Console) -> None:
    """Prints one line per arrival rate: its best improvement rate, and the TTFT of each rate."""
    table = _table("Best improvement rate", "arrivals/s")
    rates = list(rows[0].mean_ttft_s)
    shown = sorted({rates[0], rates[len(rates) // 2], rates[-1]})
    for heading in ("best", "mean TTFT s", *(f"with {rate:g}" for rate in shown)):
        table.add_column(heading, justify="right")
    for row in rows:
        means_s = [row.mean_ttft_s[rate] for rate in (row.best, *shown)]
        texts = (f"{seconds:.3f}" for seconds in means_s)
        table.add_row(f"{row.arrivals_rps:g}", f"{row.best:g}", *texts)
    console.print(table)


def _edge(result: SystemResult) -> list[str]:
    if result.edge is None or result.at_edge is None:
        return ["none"]
    total = result.at_edge.total
    return [
        f"{result.edge:.4g}",
        f"{total.attainment:.1%}",
        f"{total.goodput_rps:.2f}",
        *(f"{1e3 * value:,.0f}" for value in (total.ttft_s.p50, total.ttft_s.p99)),
    ]


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    return table


def _latencies(total: ClassReport) -> Table:
    table = _table("All that succeeded", "")
    for heading in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right")

    def row(name: str, found: Distribution, factor: float, digits: int) -> None:
        figures = (found.mean, found.p50, found.p90, found.p99, found.max)
        table.add_row(name, *(f"{value * factor:,.{digits}f}" for value in figures))

    row("TTFT, ms", total.ttft_s, 1e3, 0)
    row("TBT, a request's mean, ms", total.tbt_s, 1e3, 1)
    row("E2E, ms", total.e2e_s, 1e3, 0)
    row("TTFT / prefill alone", total.slowdown, 1.0, 2)
    row("waiting / prefill alone", total.wait_multiple, 1.0, 2)
    row("longest suspension, ms", total.longest_suspension_s, 1e3, 0)
    return table


def _classes(report: Report) -> Table:
    table = _table("Share that met its objectives", "class")
    for heading in ("n", "TTFT met", "TBT met", "both", "goodput/s", "TTFT p50 ms", "p99 ms"):
        table.add_column(heading, justify="right")
    rows = {"all": report.total} | report.classes if len(report.classes) > 1 else report.classes
    for name, found in rows.items():
        table.add_row(
            name,
            f"{found.requests:,}",
            f"{found.ttft_attainment:.1%}",
            f"{found.tbt_attainment:.1%}",
            f"{found.attainment:.1%}",
            f"{found.goodput_rps:.2f}",
            f"{1e3 * found.ttft_s.p50:,.0f}",
            f"{1e3 * found.ttft_s.p99:,.0f}",
        )
    return table


def _engine(found: EngineCounters, requests: int) -> str:
    each = 1.0 / max(1, requests)
    busy = ", ".join(f"{pool} {share:.0%}" for pool, share in found.busy_share.items())
    return (
        f"busy: {busy}. A request: {found.rounds * each:.2f} rounds, "
        f"{found.commands * each:.2f} commands, {found.chunks * each:.2f} chunks, "
        f"{found.preemptions * each:.2f} preemptions (blocking p50 {1e3 * found.blocking_s.p50:.2f}"
        f", max {1e3 * found.blocking_s.max:.2f} ms)"
    )
