"""Mermaid diagrams of the pages: what a browser alone would find."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIAGRAM = re.compile(r"(?ms)^```mermaid\n(.*?)^```$")
KINDS = {"flowchart", "sequenceDiagram", "stateDiagram-v2", "gantt"}
FOUND = [
    (f"{page.relative_to(ROOT)}:{number}", text)
    for page in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    for number, text in enumerate(DIAGRAM.findall(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize(("name", "text"), FOUND, ids=[name for name, _ in FOUND])
def test_the_diagram_is_of_a_known_kind(name: str, text: str) -> None:
    assert text.split()[0] in KINDS, name


@pytest.mark.parametrize(("name", "text"), FOUND, ids=[name for name, _ in FOUND])
def test_no_semicolon_ends_a_line_of_a_sequence(name: str, text: str) -> None:
    """In a sequence diagram a semicolon ends a statement, also inside a text."""
    assert not text.startswith("sequenceDiagram") or ";" not in text, name
