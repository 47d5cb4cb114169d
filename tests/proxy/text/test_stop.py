"""Stop strings: the first complete stop string wins, for every cut of the text into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.proxy.text.stop import StopScanner


def run(pieces, stops, include=False):
    scanner = StopScanner(tuple(stops), include)
    shown = [scanner.feed(piece) for piece in pieces]
    if scanner.matched is None:
        shown.append(scanner.flush())
    return "".join(shown), scanner.matched


def reference(text, stops, include=False):
    """Scans by character: the text ends where the first stop string is complete."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def test_is_found_across_pieces():
    assert run(["Hello <", "|en", "d|> more"], ["<|end|>"]) == ("Hello ", "<|end|>")


def test_partial_match_is_held_and_then_shown():
    scanner = StopScanner(("<|end|>",))
    assert scanner.feed("a <|e") == "a "
    assert scanner.feed("lse") == "<|else"


def test_included_when_asked_for():
    assert run(["one\n", "\ntwo"], ["\n\n"], include=True) == ("one\n\n", "\n\n")


def test_nothing_is_shown_after_the_match():
    scanner = StopScanner(("x",))
    assert scanner.feed("axb") == "a"
    assert scanner.feed("c") == ""


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcd", ["bcd", "c"], ("ab", "c")),  # c is complete first
        ("abcd", ["c", "bc"], ("a", "bc")),  # both end there: the longer
        ("aaab", ["aab"], ("a", "aab")),
    ],
)
def test_first_to_end_wins(text, stops, expected):
    assert run(list(text), stops) == expected
    assert run([text], stops) == expected


letters = st.text("ab<", max_size=12)


@given(
    st.lists(letters, max_size=6),
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_pieces_do_not_matter(pieces, stops, include):
    assert run(pieces, stops, include) == reference("".join(pieces), stops, include)
