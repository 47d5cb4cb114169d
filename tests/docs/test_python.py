"""The programs of the simulator's page run."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/simulator.md"
BLOCK = re.compile(r"(?ms)^```python\n(.*?)^```$")


def test_the_programs_of_the_simulators_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other in one notebook."""
    names: dict[str, object] = {}
    shown = []
    for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        exec(compile(block, str(PAGE), "exec"), names)
        shown.append(capsys.readouterr().out.split())
    systems, attainment = shown
    assert systems[::4] == ["fcfs", "s_edf", "millrace"]
    assert all(0.0 < float(one) <= 1.0 for one in (*systems[1::4], *attainment))
    assert float(systems[5]) > float(systems[1]), "S-EDF is better than FCFS"
