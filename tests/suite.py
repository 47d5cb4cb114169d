"""Runs the suite in parts, every one of them whatever the others find: `python tests/suite.py`.

What failed in any part is repeated at the end, before each part's last line. Ends with status 1
when lint or a test failed. `--unit` runs the tests that one edits against.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
QUICK = ("-m", "not slow and not gpu", "--durations=12", "--durations-min=2")
#: One more process than cores: tests wait for processes that they start, and for each other. A
#: file's tests share stacks, so they stay together. Files come in the order of their names: whole
#: stacks early, and small files at the end, which leaves no process waiting for another.
SHARED = (
    *("-n", str(len(os.sched_getaffinity(0)) + 1), "--dist", "loadfile"),
    "--no-loadscope-reorder",
)

#: Rules, papers, the simulator, and services without models: about 200 s of CPU time in all. Whole
#: experiments, explorations of every order of events, and fuzzing would double that.
UNIT = ("core", "papers", "profiles", "proxy", "scheduler", "sim", "state", "telemetry", "wire")
LONG = (
    *("core/instance/test_gang_explorer.py", "papers/test_goodputs.py", "papers/test_sim_*.py"),
    *("proxy/http/description/test_openapi.py", "sim/studies"),
)

#: Lines of pytest's summary that are worth a second look.
_FAILED = re.compile(r"(FAILED|ERROR) ")


@dataclass(frozen=True, slots=True)
class Part:
    """One command, and what it found."""

    name: str
    status: int
    failures: Sequence[str]
    last_line: str


def run(name: str, command: Sequence[str], *, is_live: bool = True) -> Part:
    """Runs a command in the repository's root, and shows its output: as it comes, or at the end."""
    failures: list[str] = []
    last_line = ""
    shown = [f"\n== {name}\n"]
    with subprocess.Popen(
        command, cwd=TESTS.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            shown.append(line)
            if is_live:
                show(shown)
            if _FAILED.match(line):
                failures.append(line.rstrip())
            last_line = line.rstrip() or last_line
    show(shown)
    return Part(name, process.returncode, failures, last_line)


def show(lines: list[str]) -> None:
    """Prints the lines in one piece, and empties the list."""
    print("".join(lines), end="", flush=True)
    lines.clear()


def run_all(commands: Mapping[str, Sequence[str]]) -> list[Part]:
    """Runs all parts side by side; shows the last one's output as it comes."""
    last = list(commands)[-1]
    with ThreadPoolExecutor(len(commands)) as pool:
        parts = pool.map(lambda one: run(*one, is_live=one[0] == last), commands.items())
        return list(parts)


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *QUICK, *arguments]


def parts(unit: bool) -> dict[str, list[str]]:
    """Commands by name."""
    if unit:
        folders = [f"tests/{name}" for name in UNIT]
        left_out = [f"--ignore-glob=tests/{name}" for name in LONG]
        return {"unit tests": pytest(*SHARED, *left_out, *folders)}
    return {"lint": ["make", "--no-print-directory", "lint"], "tests": pytest(*SHARED)}


def main(arguments: Sequence[str]) -> int:
    done = run_all(parts("--unit" in arguments))
    print("\n== in all")
    for part in done:
        verdict = "passed" if part.status == 0 else f"FAILED, status {part.status}"
        print(f"-- {part.name}: {verdict}", *part.failures, part.last_line, sep="\n")
    return int(any(part.status for part in done))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
