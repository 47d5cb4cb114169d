"""The input of custom tools is read from arguments that arrive in any pieces."""

from __future__ import annotations

import json
import random

import pytest

from millrace.proxy.parsing.custom_input import InputReader, WholeInput
from millrace.proxy.parsing.events import Arguments, CallStarted

TEXTS = ["", "a", 'say "hi"\n\\ and \t/', "naïve 中文 😀", "*** Begin Patch\n+x\n", "\u2028\x7f"]


def read(pieces):
    reader = InputReader()
    return "".join(reader.read(piece) for piece in pieces)


def pieces_of(text, rng):
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_text_is_the_same_however_it_is_split(text, ascii_only):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert read([arguments]) == text
    assert read(list(arguments)) == text
    rng = random.Random(7)
    for _ in range(50):
        assert read(pieces_of(arguments, rng)) == text


def test_text_comes_as_soon_as_it_is_certain():
    reader = InputReader()
    found = [
        reader.read(piece) for piece in (' { "in', 'put" : ', '"ab', "c\\", "n\\u00", 'e9"', "}")
    ]
    assert found == ["", "", "ab", "c", "\n", "é", ""]
    reader = InputReader()
    found = [reader.read(piece) for piece in ('{"input":"\\ud83d', "\\ud", 'e00"}')]
    assert found == ["", "", "😀"]


def test_half_a_surrogate_pair_is_replaced():
    for half in ("\\ud83d", "\\udc00", "\\ud83d\\ud83d", "\\ud83d\\n"):
        arguments = f'{{"input":"a{half}b"}}'
        for pieces in ([arguments], list(arguments)):
            text = read(pieces)
            assert (text[0], text[1], text[-1]) == ("a", "\ufffd", "b")
            text.encode()


@pytest.mark.parametrize(
    "arguments",
    ["{}", '{"patch": "x"}', '{"input": 5}', '{"input": {"a": "b"}}', '{"in put": "x"}', "null"],
)
def test_other_arguments_are_the_input_as_they_stand(arguments):
    assert read([arguments]) == read(list(arguments)) == arguments


def test_further_arguments_are_left_out():
    assert read(list('{"input": "a", "why": "b"}')) == "a"


def test_arguments_that_are_cut_off_give_what_is_certain():
    assert read(['{"inp']) == ""
    assert read(['{"input": "ab\\u00']) == "ab"


@pytest.mark.parametrize("text", TEXTS)
def test_a_whole_answer_is_the_input(text):
    parser = WholeInput("patch")
    events = [event for piece in text for event in parser.feed(piece)] + parser.finish()
    assert events[0] == CallStarted(0, "patch")
    assert {type(event) for event in events[1:]} == {Arguments}
    arguments = "".join(event.text for event in events[1:])
    assert json.loads(arguments) == {"input": text}
    assert read([event.text for event in events[1:]]) == text
