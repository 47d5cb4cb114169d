"""Draws the pictures of simulations, without a display."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import ConfigError, reason_of
from millrace.sim.results.report import CDF_SHARES, ClassReport, Report
from millrace.sim.results.timeline import Block

_NO_REQUEST_COLOUR = "#c8c8c8"
_HATCHES = {"prefill": "", "decode": "", "idle wait": "....", "blocked": "xxxx"}
_MOST_LABELS = 40  # instance names on a chart before they are thinned out


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Attainment of one system, 0 to 1, at several loads, ascending."""

    name: str
    loads: Sequence[float]
    attainments: Sequence[float]


def draw_attainment(
    curves: Sequence[Curve], path: Path, *, goal: float = 0.9, label: str = "request rate (1/s)"
) -> None:
    """Draws a PNG of attainment against load, a line per system, and the goal as a dotted line."""

    def draw(figure: Any) -> None:  # noqa: ANN401 - matplotlib is untyped
        axes = figure.subplots()
        for number, curve in enumerate(curves):
            axes.plot(
                curve.loads,
                [100 * share for share in curve.attainments],
                marker="o",
                markersize=4,
                color=f"C{number % 10}",
                label=curve.name,
            )
        axes.axhline(100 * goal, color="grey", linestyle=":")
        axes.set(xlabel=label, ylabel="requests within their objectives (%)", ylim=(0, 102))
        axes.set_xlim(left=0)
        _finish(axes)

    _save(draw, path, (7.0, 4.4))


@dataclass(frozen=True, slots=True)
class Panel:
    """One of a figure's charts: lines by name, each of (x, y) points.

    `mark` is the height of a dotted line, `edges` holds an x to mark per line.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    _: KW_ONLY
    log_x: bool = False
    log_y: bool = False
    mark: float | None = None
    edges: Mapping[str, float] = field(default_factory=dict)


def points(
    rows: Iterable[Mapping[str, Any]], x: str, y: str, scale: float = 1.0
) -> list[tuple[float, float]]:
    """Returns a line of a panel: `x` of each row, and `scale` times its `y`."""
    return [(row[x], scale * row[y]) for row in rows]


def lines_by(
    rows: Iterable[Mapping[str, Any]], name: str, x: str, y: str, scale: float = 1.0
) -> dict[str, list[tuple[float, float]]]:
    """Returns a panel's lines: rows whose `name`, a template of fields, is equal make a line."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(name.format_map(row), []).extend(points([row], x, y, scale))
    return found


def draw_panels(rows: Sequence[Sequence[Panel]], path: Path) -> None:
    """Draws a PNG of charts in rows; a line's colour is that of its name's place in its chart."""

    def draw(figure: Any) -> None:  # noqa: ANN401
        grid = figure.subplots(len(rows), max(map(len, rows)), squeeze=False)
        for places, panels in zip(grid, rows, strict=True):
            for axes in places[len(panels) :]:
                axes.axis("off")
            for axes, panel in zip(places, panels, strict=False):
                _panel(axes, panel)

    _save(draw, path, (4.2 * max(map(len, rows)) + 0.4, 3.4 * len(rows) + 0.2))


def draw_run(report: Report, path: Path) -> None:
    """Draws a PNG of one run: TTFT's CDF by class on the left, attainment by class on the right."""

    def draw(figure: Any) -> None:  # noqa: ANN401
        left, right = figure.subplots(1, 2)
        for number, (name, found) in enumerate(report.classes.items()):
            _cdf(left, found, f"{name} ({found.requests})", f"C{number % 10}")
        left.set(title="Time to first token, by class")
        _finish_cdf(left)
        _class_bars(right, {"": report})
        right.set(title="Requests within their objectives")

    _save(draw, path, (11.0, 4.4))


def draw_board(blocks: Sequence[Block], path: Path) -> None:
    """Draws a PNG Gantt chart: instances over time, blocks coloured by request."""

    def draw(figure: Any) -> None:  # noqa: ANN401
        from matplotlib.patches import Patch

        axes = figure.subplots()
        names = sorted({block.instance_id for block in blocks}, key=_row_order)
        rows = {name: row for row, name in enumerate(names)}
        for kind, hatch in _HATCHES.items():
            own = [block for block in blocks if block.kind == kind]
            axes.barh(
                [rows[block.instance_id] for block in own],
                [block.end_s - block.start_s for block in own],
                left=[block.start_s for block in own],
                height=0.5 if kind == "idle wait" else 0.86,
                color=[_colour(block) for block in own],
                hatch=hatch,
                edgecolor="white",
                linewidth=0.3,
            )
        step = ceil_div(len(names), _MOST_LABELS)
        axes.set_yticks(range(0, len(names), max(1, step)), names[:: max(1, step)], fontsize=7)
        axes.set(xlabel="time (s)", ylabel="instance", ylim=(len(names) - 0.4, -0.6))
        axes.margins(x=0.01)
        axes.grid(axis="x", alpha=0.3)
        kinds = sorted({block.kind for block in blocks})
        if kinds:
            axes.legend(
                handles=[
                    Patch(
                        facecolor="C0" if kind == "prefill" else _NO_REQUEST_COLOUR,
                        hatch=_HATCHES[kind],
                        edgecolor="white",
                        label="prefill (a colour a request)" if kind == "prefill" else kind,
                    )
                    for kind in kinds
                ],
                loc="lower right",
                bbox_to_anchor=(1.0, 1.0),
                ncols=len(kinds),
                frameon=False,
                fontsize=8,
            )

    rows = len({block.instance_id for block in blocks})
    _save(draw, path, (12.0, min(16.0, 1.6 + 0.26 * rows)))


def _panel(axes: Any, panel: Panel) -> None:  # noqa: ANN401
    for number, (name, points) in enumerate(panel.lines.items()):
        marker = "o" if len(points) <= 40 else ""
        colour = f"C{number % 10}"
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, marker=marker, markersize=3, color=colour, label=name)
        if name in panel.edges:
            axes.axvline(panel.edges[name], color=colour, linestyle="--", linewidth=0.8)
    if panel.mark is not None:
        axes.axhline(panel.mark, color="grey", linestyle=":")
    axes.set(xlabel=panel.x, ylabel=panel.y)
    axes.set_title(panel.title, fontsize=10)
    if panel.log_x:
        axes.set(xscale="log")
    if panel.log_y:
        axes.set(yscale="log")
    _finish(axes)


def _cdf(axes: Any, found: ClassReport, label: str, colour: str) -> None:  # noqa: ANN401
    if not found.succeeded:
        return
    share = found.succeeded / found.requests
    heights = [100 * share * at for at in CDF_SHARES]
    times_ms = [1e3 * value for value in found.ttft_quantiles_s]
    axes.plot(times_ms, heights, color=colour, label=label)


def _finish_cdf(axes: Any) -> None:  # noqa: ANN401
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set(xscale="log", xlabel="TTFT (ms)", ylabel="requests (%)", ylim=(0, 102))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    _finish(axes)


def _class_bars(axes: Any, reports: Mapping[str, Report]) -> None:  # noqa: ANN401
    names = sorted({name for report in reports.values() for name in report.classes})
    columns = ["all", *names] if len(names) > 1 else names
    width = 0.8 / max(1, len(reports))
    for number, (system, report) in enumerate(reports.items()):
        found = {"all": report.total} | report.classes
        places = [
            index + (number - (len(reports) - 1) / 2) * width
            for index, name in enumerate(columns)
            if name in found
        ]
        heights = [100 * found[name].attainment for name in columns if name in found]
        bars = axes.bar(places, heights, width, color=f"C{number % 10}", label=system or None)
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    axes.set_xticks(range(len(columns)), columns)
    axes.set(ylabel="requests within their objectives (%)", ylim=(0, 108))
    _finish(axes)


def _finish(axes: Any) -> None:  # noqa: ANN401
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _colour(block: Block) -> Any:  # noqa: ANN401
    """Returns a request's colour, the same everywhere; neighbours in order of arrival differ."""
    if block.request_index < 0 or block.kind == "decode":
        return _NO_REQUEST_COLOUR
    from matplotlib import colormaps

    return colormaps["tab20"](block.request_index * 7 % 20)


def _row_order(name: str) -> tuple[int, int, str]:
    """Sorts prefill above mixed above decode instances, p2 before p10."""
    head = name.rstrip("0123456789")
    return "pmkd".find(head[:1]), int(name[len(head) :] or -1), name


def _save(draw: Callable[[Any], None], path: Path, inches: tuple[float, float]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained", dpi=120)
    draw(figure)
    try:
        FigureCanvasAgg(figure).print_png(path)  # type: ignore[no-untyped-call] # matplotlib
    except OSError as error:
        raise ConfigError(f"plot {path}: {reason_of(error)}") from error
