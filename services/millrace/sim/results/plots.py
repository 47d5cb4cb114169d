"""Draws the pictures of simulations, without a display."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import ConfigError, reason_of
from millrace.sim.results.report import CDF_SHARES, Report
from millrace.sim.results.timeline import Block

_NO_REQUEST_COLOUR = "#c8c8c8"
_HATCHES = {"prefill": "", "decode": "", "idle wait": "....", "blocked": "xxxx"}
_MOST_LABELS = 40  # instance names on a chart before they are thinned out


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


@dataclass(frozen=True, slots=True)
class Bars:
    """One of a figure's charts: groups of bars, with a bar of each name in every group.

    `values` has a value per group, by name. `mark` is the value of a dotted line. `form` is the
    format of the values beside their bars. Bars that are `flat` lie, with the first group on top.
    """

    title: str
    unit: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float]]
    _: KW_ONLY
    mark: float | None = None
    form: str = ""
    limits: tuple[float, float] | None = None
    log: bool = False
    flat: bool = False


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


def draw_panels(
    rows: Sequence[Sequence[Panel | Bars]], path: Path, inches: tuple[float, float] = (4.2, 3.4)
) -> None:
    """Draws a PNG of charts in rows, each `inches` wide and high. A line's or bar's colour is that
    of its name's place in its chart. Raises ConfigError for a bad path.
    """
    columns = max(1, *map(len, rows))

    def draw(figure: Any) -> None:  # noqa: ANN401 - matplotlib is untyped
        grid = figure.subplots(len(rows), columns, squeeze=False)
        for places, charts in zip(grid, rows, strict=True):
            for axes in places[len(charts) :]:
                axes.axis("off")
            for axes, chart in zip(places, charts, strict=False):
                if isinstance(chart, Panel):
                    _draw_panel(axes, chart)
                else:
                    _draw_bars(axes, chart)

    width, height = inches
    _save(draw, path, (width * columns + 0.4, height * len(rows) + 0.2))


def draw_run(report: Report, path: Path) -> None:
    """Draws a PNG of one run: TTFT's CDF by class on the left, attainment by class on the right."""
    cdfs = {
        f"{name} ({found.requests})": [
            (1e3 * ttft_s, 100 * share * found.succeeded / found.requests)
            for ttft_s, share in zip(found.ttft_quantiles_s, CDF_SHARES, strict=True)
        ]
        for name, found in report.classes.items()
        if found.succeeded
    }
    classes = report.classes
    shown = {"all": report.total} | classes if len(classes) > 1 else classes
    attained = [100 * found.attainment for found in shown.values()]
    draw_panels(
        [
            [
                Panel(
                    "Time to first token, by class", "TTFT (ms)", "requests (%)", cdfs, log_x=True
                ),
                Bars(
                    "Requests within their objectives",
                    "requests (%)",
                    list(shown),
                    {"": attained},
                    form="%.1f",
                    limits=(0, 108),
                ),
            ]
        ],
        path,
        (5.3, 4.2),
    )


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


def _draw_panel(axes: Any, panel: Panel) -> None:  # noqa: ANN401
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


def _draw_bars(axes: Any, chart: Bars) -> None:  # noqa: ANN401
    width = 0.8 / max(1, len(chart.values))
    draw = axes.barh if chart.flat else axes.bar
    for number, (name, values) in enumerate(chart.values.items()):
        shift = (number - (len(chart.values) - 1) / 2) * width
        places = [group + shift for group in range(len(chart.groups))]
        bars = draw(places, values, width, color=f"C{number % 10}", label=name or None)
        if chart.form:
            axes.bar_label(bars, fmt=chart.form, fontsize=7, padding=1)
    across, along = ("y", "x") if chart.flat else ("x", "y")
    ticks = axes.set_yticks if chart.flat else axes.set_xticks
    ticks(range(len(chart.groups)), chart.groups, fontsize=7)
    axes.margins(**{across: 0.01})
    axes.set(**{f"{along}label": chart.unit})
    if chart.flat:
        axes.invert_yaxis()
    if chart.limits is not None:
        axes.set(**{f"{along}lim": chart.limits})
    if chart.log:
        axes.set(**{f"{along}scale": "log"})
    if chart.mark is not None:
        (axes.axvline if chart.flat else axes.axhline)(chart.mark, color="grey", linestyle=":")
    axes.set_title(chart.title, fontsize=10)
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
