"""Sections, figures, tables, algorithms and equations that we cite are in the papers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "kernels", "operator", "proto", "services", "tests")
SUFFIXES = {".cpp", ".hpp", ".md", ".proto", ".py", ".pyi"}

#: Per paper: subsections of each section (an appendix has letters), then the last numbers.
PAPERS = {
    "FlowPrefill": (
        {"1": 0, "2": 2, "3": 2, "4": 0, "5": 2, "6": 5, "7": 0, "8": 0},
        {"figure": 17, "table": 2, "algorithm": 2, "equation": 3},
    ),
    "Tetris": (
        {"1": 0, "2": 4, "3": 2, "4": 2, "5": 2, "6": 0, "7": 4, "8": 0},
        {"figure": 14, "table": 2, "algorithm": 3, "equation": 2},
    ),
    "Mnemosyne": (
        {"1": 0, "2": 4, "3": 3, "4": 5, "5": 0, "6": 5, "7": 0, "8": 0, "9": 0},
        {"figure": 22, "table": 2, "algorithm": 0, "equation": 10},
    ),
    "Medha": (
        {"1": 0, "2": 6, "3": 3, "4": 3, "5": 0, "6": 5, "7": 0, "8": 0, "A": 3, "B": 4},
        {"figure": 20, "table": 1, "algorithm": 3, "equation": 1},
    ),
}

KINDS = {"§": "section", "section": "section", "appendix": "section", "eq": "equation"}
KINDS |= {"fig": "figure", "figure": "figure", "table": "table"}
KINDS |= {"alg": "algorithm", "algorithm": "algorithm"}

ONE = r"(?:[AB]|\d+)(?:\.\d)?(?![A-Za-z\d])"
NUMBER = rf"\(?{ONE}\)?(?:-[a-f])?"
KIND = r"(?P<kind>§|(?i:sections?|appendix|fig(?:ures?)?|tables?|alg(?:orithms?)?|eqs?)\b\.?)"
CITED = re.compile(
    rf"\W{{0,2}}\s?(?:and )?{KIND} ?(?P<numbers>{NUMBER}(?:(?:,| and| to) {NUMBER})*)"
)
#: "Tetris 4.1": a section without the word.
BARE = re.compile(r" (?P<number>[1-9]\.[1-9])(?=[,.;:)]\D| and )")
NAME = re.compile(rf"\b({'|'.join(PAPERS)})(?:'s| \(CDSP\))?")


def citations(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields (paper, kind, number) of each citation."""
    flat = re.sub(r"\s*\n\s*(?:#:?|//|\*)?\s*", " ", text)
    for name in NAME.finditer(flat):
        at = name.end()
        if bare := BARE.match(flat, at):
            yield name[1], "section", bare["number"]
            at = bare.end()
        while found := CITED.match(flat, at):
            kind = KINDS[found["kind"].lower().rstrip(".").removesuffix("s")]
            for number in re.findall(ONE, found["numbers"]):
                yield name[1], kind, number
            at = found.end()


def is_in_paper(paper: str, kind: str, number: str) -> bool:
    sections, last = PAPERS[paper]
    if kind == "section":
        section, _, below = number.partition(".")
        return section in sections and int(below or 0) <= sections[section]
    return number.isdecimal() and 1 <= int(number) <= last[kind]


def files() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return [path for path in found if path.suffix in SUFFIXES and path != Path(__file__)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Tetris section 5.1, Algorithms 1 to 3, Eq. (1) and (2).", "5.1 1 3 1 2"),
        ("Medha's\n# appendix A.3, Alg. 3. Deviations: 9.", "A.3 3"),
        ("FlowPrefill (sections 5.1 and 6.4: all)", "5.1 6.4"),
        ("Mnemosyne 4.4, Medha 3.3 and figure 6", "4.4 3.3 6"),
        ("Tetris figure 7-b; FlowPrefill is 1.7 times faster, Medha §4.1", "7 4.1"),
        ("FlowPrefill 2.2 times, Tetris 3 s in section 9", ""),
    ],
)
def test_citations_are_found(text: str, found: str) -> None:
    assert " ".join(number for _, _, number in citations(text)) == found


def test_every_cited_part_is_in_its_paper() -> None:
    cited = {
        (str(path.relative_to(ROOT)), *one)
        for path in files()
        for one in citations(path.read_text(encoding="utf-8"))
    }
    assert len(cited) > 200
    assert not sorted(one for one in cited if not is_in_paper(*one[1:]))
