"""docs/reference/api.md lists every field that the proxy knows, and how it is treated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from millrace.proxy.request.options import Limits
from millrace.proxy.request.validation import Bodies

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "api.md"

#: Fields of which only values without an effect are accepted.
NARROW = {"modalities"}
#: Fields that only one of the two endpoints serves; the page says so.
BY_ENDPOINT = {"echo": "served"}


def documented() -> dict[str, str]:
    """Returns each field of the page's table: served, ignored or refused."""
    text = PAGE.read_text()
    table = text[text.index("### What other clients send") : text.index("### Scoring a prompt")]
    found: dict[str, str] = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            fields, here, _ = line.strip("| ").split(" | ")
            for name in re.findall(r"`(\w+)`", fields):
                assert name not in found, f"{name} is there twice"
                found[name] = here.split()[0]
    return found


def test_the_page_says_what_becomes_of_each_field():
    limits = Limits(model="m", vocab_size=10, context_tokens=10, eos_token_ids=())
    bodies = Bodies(limits)
    fields = {
        name: field
        for model in (bodies.chat, bodies.completion)
        for name, field in model.json_schema()["properties"].items()
    }
    wanted = {name: BY_ENDPOINT.get(name, standing(name, field)) for name, field in fields.items()}
    assert documented() == wanted


def standing(name: str, field: dict[str, Any]) -> str:
    if name in NARROW:
        return "refused"
    found = {"Not supported.": "refused", "Accepted and ignored.": "ignored"}
    return found.get(field.get("description", ""), "served")
