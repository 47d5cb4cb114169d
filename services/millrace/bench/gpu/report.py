"""Prints the report of `millrace bench gpu`."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from millrace.bench.gpu.document import Figure, Report


def print_tables(document: dict[str, Any], console: Console) -> None:
    """Prints a line for each part, and its findings and figures."""
    report = Report.model_validate(document)
    lines = [f"{report.device}, torch {report.versions.torch}, {report.date}"]
    for part in report.parts:
        lines.append(f"{part.name}: {part.status} ({part.seconds:.1f} s) {part.reason}".rstrip())
        for finding in part.findings:
            held = "ok" if finding.passed else "FAILED"
            lines.append(f"  {held}  {finding.name}  {finding.detail}".rstrip())
        lines += [f"  {line_of(figure)}" for figure in part.figures]
    lines.append("passed" if report.passed else "FAILED")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def line_of(figure: Figure) -> str:
    """Returns a figure as one line, with its share of the peak and the expected value."""
    line = f"{figure.name}: {figure.value:,.4g} {figure.unit}"
    if figure.share is not None:
        line += f", {figure.share:.1%} of the peak"
    if figure.expected is not None:
        line += f", expected {figure.expected:,.4g}"
    return line
