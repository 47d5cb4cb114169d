"""What the programs share: how they are called, and how they tell what they got."""

import json
import sys
from typing import Any, NoReturn

URL, MODEL = sys.argv[1:3]
MESSAGES: Any = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What turns the mill?"},
]
PLACES = ("Oslo", "Rome")
CALL_TOKENS = 400  # the toy model writes a call with many spaces
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": list(PLACES)}},
            "required": ["place"],
            "additionalProperties": False,  # the toy model would write others without an end
        },
    },
}


def finish(**found: Any) -> NoReturn:
    """Prints what was found as the last line of the output."""
    print(json.dumps(found))
    sys.exit(0)
