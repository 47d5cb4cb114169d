"""Reads whether a body asks for a beam search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from millrace.proxy.errors import bad_field

#: Fields that a beam search can't obey, and the values that ask for nothing. Candidates are the
#: model's own likeliest tokens, and an answer is known when the search is over.
_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "stream": (False,),
    "echo": (False,),
    "stop": ((),),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([], ()),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "prompt_logprobs": (),
    "max_reasoning_tokens": (-1,),
    "thinking_token_budget": (-1,),
}


def read_length_penalty(
    checked: Mapping[str, Any], constraint_field: str, *, chooses_best: bool
) -> float | None:
    """Returns the length penalty of a beam search; None if the body asks for none.

    `constraint_field`: the field that constrains the answer; empty: none does. `chooses_best`: more
    choices are generated than answered. Raises ApiError naming a field that can't be combined.
    """
    if not checked.get("use_beam_search", False):
        return None
    given = (name for name, harmless in _REFUSED.items() if _asks(checked, name, harmless))
    if wrong := next(given, constraint_field or ("best_of" if chooses_best else "")):
        raise bad_field(wrong, "can't be combined with 'use_beam_search'.", "unsupported_parameter")
    penalty: float = checked.get("length_penalty", 1.0)
    return penalty


def _asks(checked: Mapping[str, Any], name: str, harmless: tuple[Any, ...]) -> bool:
    return name in checked and checked[name] not in harmless
