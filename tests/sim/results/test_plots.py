"""Pictures are drawn from their inputs, and name their units."""

from __future__ import annotations

import random

import pytest
from matplotlib.figure import Figure

from millrace.core.errors import ConfigError
from millrace.sim.results.plots import (
    Bars,
    Panel,
    draw_board,
    draw_panels,
    draw_run,
)
from millrace.sim.results.report import Collector, RequestRecord
from millrace.sim.results.timeline import Block

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def figures(monkeypatch):
    """Collects every figure made during the test."""
    made = []
    original = Figure.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Figure, "__init__", init)
    return made


def report(seed, failing=0):
    rng, collector = random.Random(seed), Collector()
    for index in range(200):
        collector.add(
            RequestRecord(
                index=index,
                class_name=rng.choice(["chat", "book"]),
                arrival_s=0.0,
                input_tokens=10,
                output_tokens=2,
                ttft_s=rng.lognormvariate(-1, 1),
                ttft_slo_s=0.5,
                error="refused" if index < failing else "",
            )
        )
    return collector.report(10.0)


def test_lines_of_points(tmp_path, figures):
    lines = {"ours": [(1.0, 100.0), (2.0, 91.0)], "fcfs": [(1.0, 90.0), (2.0, 20.0)]}
    panel = Panel("", "request rate (1/s)", "in time (%)", lines, mark=90.0)
    draw_panels([[panel]], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    axes = figures[0].axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("request rate (1/s)", "in time (%)")
    ours, fcfs, mark = axes.get_lines()
    assert [ours.get_label(), fcfs.get_label()] == ["ours", "fcfs"]
    assert list(fcfs.get_ydata()) == [90.0, 20.0]
    assert list(mark.get_ydata()) == [90.0, 90.0]


@pytest.mark.parametrize("flat", [False, True])
def test_groups_of_bars(tmp_path, figures, flat):
    values = {"ours": [1.0, 2.0], "other": [3.0, 4.0]}
    bars = Bars(
        "title", "GB/s", ["a", "b"], values, mark=2.5, form="%.1f", limits=(0.5, 8), flat=flat
    )
    draw_panels([[bars], []], tmp_path / "b.png")
    axes = figures[0].axes[0]
    drawn = [(bar.get_y(), bar.get_x(), bar.get_width()) for bar in axes.patches]
    if not flat:
        drawn = [(bar.get_x(), bar.get_y(), bar.get_height()) for bar in axes.patches]
    assert [length for *_, length in drawn] == [1.0, 2.0, 3.0, 4.0]
    assert [round(place) for place, *_ in drawn[:2]] == [0, 1]
    assert drawn[0][0] < drawn[2][0] < drawn[1][0] < drawn[3][0]  # side by side in each group
    names = axes.get_yticklabels() if flat else axes.get_xticklabels()
    assert [name.get_text() for name in names] == ["a", "b"]
    assert (axes.get_xlabel() if flat else axes.get_ylabel()) == "GB/s"
    assert (axes.get_xlim() if flat else axes.get_ylim()) == (0.5, 8)
    mark = axes.get_lines()[0]
    assert list(mark.get_xdata() if flat else mark.get_ydata()) == [2.5, 2.5]
    assert [text.get_text() for text in axes.texts] == ["1.0", "2.0", "3.0", "4.0"]


def test_a_picture_of_nothing(tmp_path):
    draw_panels([[]], tmp_path / "n.png")
    assert (tmp_path / "n.png").read_bytes().startswith(PNG)


def test_one_run(tmp_path, figures):
    """A class's CDF ends below 100 % where requests failed; bars are of all, and by class."""
    found = report(3, failing=100)
    draw_run(found, tmp_path / "r.png")
    left, right = figures[0].axes
    ends = [line.get_ydata()[-1] for line in left.get_lines()]
    wanted = [100 * one.succeeded / one.requests for one in found.classes.values()]
    assert ends == pytest.approx(wanted) and max(ends) < 100
    assert left.get_xlabel() == "TTFT (ms)"
    assert [label.get_text() for label in right.get_xticklabels()] == ["all", "book", "chat"]
    shares = [one.attainment for one in (found.total, found.classes["book"], found.classes["chat"])]
    assert [bar.get_height() for bar in right.patches] == pytest.approx([100 * s for s in shares])


def test_a_board_puts_blocks_where_they_belong(tmp_path, figures):
    blocks = [
        Block("p10", 0.5, 2.0, 7, "prefill"),
        Block("p2", 1.0, 1.5, 7, "prefill"),
        Block("p2", 1.5, 3.0, 8, "prefill"),
        Block("d0", 2.0, 4.0, 7, "decode"),
        Block("p2", 3.0, 3.2, -1, "blocked"),
    ]
    draw_board(blocks, tmp_path / "g.png")
    axes = figures[0].axes[0]
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["p2", "p10", "d0"]
    drawn = sorted(
        (rows[round(bar.get_y() + bar.get_height() / 2)], bar.get_x(), bar.get_width())
        for bar in axes.patches
    )
    wanted = sorted((b.instance_id, b.start_s, b.end_s - b.start_s) for b in blocks)
    assert [name for name, *_ in drawn] == [name for name, *_ in wanted]
    for found, asked in zip(drawn, wanted, strict=True):
        assert found[1:] == pytest.approx(asked[1:])
    colours = {
        (round(bar.get_x(), 3), round(bar.get_width(), 3)): bar.get_facecolor()
        for bar in axes.patches
    }
    assert colours[0.5, 1.5] == colours[1.0, 0.5] != colours[1.5, 1.5]  # one request, one colour
    assert axes.get_xlabel() == "time (s)"


def test_an_empty_board_is_drawn(tmp_path):
    draw_board([], tmp_path / "g.png")
    assert (tmp_path / "g.png").stat().st_size > 0


def test_a_bad_path_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        draw_run(report(1), tmp_path / "nowhere" / "r.png")
