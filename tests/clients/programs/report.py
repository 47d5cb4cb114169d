"""What the programs share: how they are called, and how they tell what they got."""

import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import openai

URL, MODEL = sys.argv[1:3]
MESSAGES: Any = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What turns the mill?"},
]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
        },
    },
}
ERRORS = (openai.APIStatusError,)


def error_of(call: Callable[[], Any], kinds: tuple[type[BaseException], ...]) -> str:
    """What the client makes of the server's refusal; empty when there was none."""
    try:
        call()
    except kinds as error:
        return str(error)
    return ""


def finish(**found: Any) -> NoReturn:
    """Prints what was found as the last line of the output."""
    print(json.dumps(found))
    sys.exit(0)
