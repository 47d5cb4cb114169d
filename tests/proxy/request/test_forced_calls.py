"""Constraints of forced calls, with the grammar of the workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from millrace.grammar.matcher import Grammars
from millrace.proxy.request.forced_calls import forced_calls

FOLDER = Path(__file__).parents[3] / "models" / "millrace-tiny"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
SCHEMAS = {
    "pick": {
        "type": "object",
        "properties": {"one": {"$ref": "#/$defs/sides"}, "$ref": {"type": "null"}},
        "required": ["one"],
        "additionalProperties": False,
        "$defs": {"sides": {"enum": ["left", "right", {"$ref": "#"}]}},
    },
    "now": {},
}


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(FOLDER, TOKENIZER.get_vocab_size(), [1])
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "most", "fits"),
    [
        ('[{"name": "pick", "arguments": {"one": "left"}}]', None, True),
        ('[{"name": "now", "arguments": {"any": 1}}]', None, True),
        ('[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', None, True),
        ('[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', 1, False),
        ('[{"name": "pick", "arguments": {"one": "up"}}]', None, False),
        ('[{"name": "pick", "arguments": {}}]', None, False),
        ('[{"name": "other", "arguments": {}}]', None, False),
        ("[]", None, False),
        ("Hello", None, False),
    ],
)
def test_only_calls_of_the_functions_fit(grammars, text, most, fits):
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    matcher = grammars.matcher(forced_calls(SCHEMAS, most=most))
    for token_id in ids:
        matcher.consume(token_id)
    assert (matcher.error == "") == fits
