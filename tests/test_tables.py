"""Tables are filled from a template."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from millrace.tables import Output, judged, table


def lines(template, rows, headings="a | b"):
    console = Console(file=io.StringIO(), record=True, width=60)
    console.print(table("title", headings, template, rows, left=1, caption="end"))
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_units_and_absent_values():
    rows = [{"name": "x | y", "s": 0.0125, "n": None}, {"name": "z", "s": 2, "n": 3 << 20, "k": 1}]
    found = lines("{name} | {s:ms,.1f} {n:MiB.0f} {k?:.2f}", rows)
    assert "x | y 12.5" in found and "z 2,000.0 3 1.00" in found and found[-1] == "end"


def test_a_name_that_is_in_no_row_is_an_error():
    with pytest.raises(KeyError, match="missing"):
        lines("{name} | {missing}", [{"name": "x"}])


def test_shares_and_judgements():
    found = lines("{share:.0%} | {share:%.0f} {ratio}", [{"share": 0.5, "ratio": judged(2, True)}])
    assert "50% 50 2.00" in found


def test_a_table_that_is_wider_than_the_terminal_keeps_every_digit():
    console = Output(file=io.StringIO(), record=True, width=30)
    headings = " | ".join(f"heading{i}" for i in range(6))
    row = {"name": "first", "n": 123456}
    console.print(table("", headings, "{name}" + " | {n:,}" * 5, [row], left=1))
    assert console.export_text().count("123,456") == 5
