"""The results of an experiment: printed beside the paper's figures, written as JSON, drawn as
PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from millrace.sim.results.plots import Panel, draw_panels
from millrace.sim.results.report import write_json

#: Takes the last progress text of a measurement.
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure: its name, the paper's value and ours, as text."""

    what: str
    paper: str
    ours: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All results of an experiment.

    `assumptions` say where its setting differs from the paper's.
    """

    title: str
    assumptions: Sequence[str]
    findings: Sequence[Finding]
    results: Mapping[str, Any]  # for the JSON document: plain values only
    panels: Sequence[Sequence[Panel]] = ()  # rows of charts; without any, nothing is drawn

    def publish(self, console: Console, json_path: Path | None, plot_path: Path | None) -> None:
        """Prints the results and writes the requested files. Raises ConfigError for a bad path."""
        console.print(self.title, style="bold")
        for assumption in self.assumptions:
            console.print(f"  {assumption}", style="dim")
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        table.add_column("paper", justify="right")
        table.add_column("here", justify="right")
        for finding in self.findings:
            table.add_row(finding.what, finding.paper, finding.ours)
        console.print(table)
        if json_path is not None:
            document = asdict(self)
            del document["panels"]
            write_json(json_path, _short(document))
        if plot_path is not None:
            if self.panels:
                draw_panels(self.panels, plot_path)
            else:
                console.print("This experiment has no picture: --plot wrote nothing.")


def _short(value: Any) -> Any:  # noqa: ANN401 - a JSON value
    """Rounds floats to five digits: seeds differ by more than the digits that are cut."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(name): _short(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return value
