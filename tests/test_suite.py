"""`make test` runs every part, repeats what failed at the end, and fails if any part did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import suite


def part(folder: Path, name: str, body: str) -> list[str]:
    """The command that runs a test file of one line."""
    file = folder / f"test_{name}.py"
    file.write_text(f"def test_{name}():\n    {body}\n")
    return [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", str(file)]


@pytest.mark.parametrize("bodies", [("assert 0", "assert 1"), ("assert 1", "assert 0")])
def test_a_failure_stops_no_other_part_and_is_told_last(tmp_path, monkeypatch, capsys, bodies):
    names = ("one", "two")
    commands = {n: part(tmp_path, n, body) for n, body in zip(names, bodies, strict=True)}
    monkeypatch.setattr(suite, "parts", lambda unit: commands)
    assert suite.main([]) == 1
    told = capsys.readouterr().out.split("== in all\n")[1].splitlines()
    failed = names[bodies.index("assert 0")]
    assert [line for line in told if line.startswith("--")] == [
        f"-- {name}: " + ("FAILED, status 1" if name == failed else "passed") for name in names
    ]
    assert sum(line.startswith("FAILED ") and f"::test_{failed}" in line for line in told) == 1
    assert "in " in told[-1] and ("passed" in told[-1] or "failed" in told[-1])  # pytest's own


def test_all_is_well(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "parts", lambda unit: {"one": part(tmp_path, "one", "assert 1")})
    assert suite.main([]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("=")


def test_the_whole_suite_leaves_no_folder_out():
    assert all((suite.TESTS / name).is_dir() for name in suite.UNIT)
    *_, tests = suite.parts(unit=False).values()
    assert not [argument for argument in tests if argument.startswith(("tests", "--ignore"))]


def test_what_takes_long_is_left_out_of_the_unit_tests():
    assert all(list(suite.TESTS.glob(name)) for name in suite.LONG)
    (command,) = suite.parts(unit=True).values()
    left_out = [argument for argument in command if argument.startswith("--ignore")]
    listed = subprocess.run(
        suite.pytest("--collect-only", "-q", *left_out, "tests/papers"),
        cwd=suite.TESTS.parent,
        text=True,
        capture_output=True,
        check=True,
    ).stdout
    assert "tests/papers/test_edf.py::" in listed
    assert "tests/papers/test_sim_" not in listed
