"""Translates constraints into the grammars of llguidance."""

from __future__ import annotations

import json
from typing import Any, Final

from llguidance import LLMatcher, StructTag, grammar_from

from millrace.core.request_spec import Constraint

#: The longest text of a constraint, in characters.
MOST_CHARACTERS: Final = 1 << 16

# Between two tokens of JSON. Without a limit a model may write white space until `max_tokens`.
_JSON_OPTIONS: Final[Any] = {"whitespace_pattern": r"[ \n\t]{0,32}"}
_LEAST_TAG: Final = frozenset({"begin", "end", "schema"})


class GrammarError(ValueError):
    """Raised for a constraint that is no grammar. The text is the reason, for the client."""


def grammar_of(constraint: Constraint) -> str:
    """Returns llguidance's grammar. It may still be invalid.

    Raises GrammarError for a text that is too long or that can't be read.
    """
    text = constraint.text
    if len(text) > MOST_CHARACTERS:
        raise GrammarError(f"it has {len(text)} characters; {MOST_CHARACTERS} are allowed")
    try:
        return _READERS[constraint.kind](text)
    except KeyError as error:
        raise GrammarError(f"{error} is missing or unknown") from error
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        raise GrammarError(str(error)) from error


def _json_schema(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)


def _json_object(text: str) -> str:
    options = json.loads(text) if text else {}
    return _json_schema(json.dumps({"type": "object", "x-guidance": options}))


def _choice(text: str) -> str:
    """Reads a JSON array of strings."""
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
    return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))


def _grammar(text: str) -> str:
    """Reads Lark's notation, or GBNF, which has `::=`."""
    return grammar_from("grammar", text)


def _structural_tag(text: str) -> str:
    """Reads an object with `structures` (begin, schema, end) and `triggers`, as vLLM's."""
    given = json.loads(text)
    tags = []
    for one in given["structures"]:
        if missing := _LEAST_TAG - one.keys():
            raise GrammarError(f"a structure lacks {', '.join(sorted(missing))}")
        triggers = [found for found in given["triggers"] if one["begin"].startswith(found)]
        if not triggers:
            raise GrammarError(f"no trigger begins {one['begin']!r}")
        tags.append(
            StructTag(
                trigger=max(triggers, key=len),
                begin=one["begin"],
                grammar=json.dumps(one["schema"]),
                end=one["end"],
            )
        )
    return StructTag.to_grammar(tags, assume_special=False)


_READERS: Final = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
