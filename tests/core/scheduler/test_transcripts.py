"""Plays the transcripts in `transcripts/`: events in, effects out, as text.

A case begins with `== title`; events before a file's first case begin every case of it. A line that
is not indented holds events, parted by `;`, as calls of `core.scheduler.narrator.Narrator` or
`support.core_events.Bench`: `submit a 100 ttft_s=2.0`. The indented lines below it are all effects
that these events caused, in order, then the counts that rose (`ignored +1`) and what `show NAME`
asked for: an instance, a request or `machine`. Of a line that begins with `given` nothing is
written down. `#` begins a comment. `pytest tests/core/scheduler/test_transcripts.py --rewrite`
replaces the indented lines by the machine's present effects: read the diff before you commit
it.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from core.scheduler.narrator import Narrator

FOLDER = Path(__file__).parent / "transcripts"


def parts(text: str) -> tuple[str, list[str]]:
    """Returns the text before the first case, and each case with its title."""
    before, *found = re.split(r"^(?=== )", text, flags=re.MULTILINE)
    return before, found


def played(before: str, case: str) -> str:
    """Returns the case with its own events and comments, and the machine's present effects."""
    narrator = Narrator()
    lines = []
    for line in before.splitlines() + case.splitlines():
        if not line.startswith(" "):
            told = narrator.tell(line) if line and not line.startswith(("#", "==")) else ()
            lines += [line, *(f"  {said}" for said in told)]
    return "\n".join(lines[lines.index(case.splitlines()[0]) :]) + "\n"


ALL = [
    pytest.param(path, before, case, id=f"{path.stem}: {case.splitlines()[0][3:]}")
    for path in sorted(FOLDER.glob("*.txt"))
    for before, cases in [parts(path.read_text())]
    for case in cases
]


@pytest.mark.parametrize(("path", "before", "case"), ALL)
def test_the_machine_does_what_was_written_down(
    path: Path, before: str, case: str, pytestconfig: pytest.Config
) -> None:
    found = played(before, case)
    if pytestconfig.getoption("--rewrite"):
        path.write_text(path.read_text().replace(case, found))
        return
    wanted, got = (text.splitlines() for text in (case, found))
    if diff := list(difflib.unified_diff(wanted, got, str(path), "played now", lineterm="", n=99)):
        pytest.fail("\n".join(diff), pytrace=False)
