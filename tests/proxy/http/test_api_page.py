"""docs/reference/api.md names every field that the proxy knows, and what becomes of it."""

from __future__ import annotations

import re
from pathlib import Path

from millrace.proxy.request.fields import Ignored, Kind, Unsupported
from millrace.proxy.request.options import Limits
from millrace.proxy.request.validation import Bodies

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "api.md"

#: Refused by more than their kind: alone the values that ask for nothing are let through.
NARROW = {"tools", "response_format", "modalities"}
#: Served by one of the two endpoints alone; the page says so.
BY_ENDPOINT = {"echo": "served"}


def documented() -> dict[str, str]:
    """Each field of the page's table, and whether it is served, ignored or refused."""
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
    wanted = {
        name: BY_ENDPOINT.get(name, standing(name, kind))
        for name, kind in {**bodies.chat, **bodies.completion}.items()
    }
    assert documented() == wanted


def standing(name: str, kind: Kind) -> str:
    if name in NARROW or isinstance(kind, Unsupported):
        return "refused"
    return "ignored" if isinstance(kind, Ignored) else "served"
