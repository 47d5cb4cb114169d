"""Writes docs/reference/parameters.md from the models that check request bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from docs.reference.other_apis import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    client_fields,
    vllm_fields,
)

from millrace.proxy.request.options import Limits
from millrace.proxy.request.pooled import PooledBodies
from millrace.proxy.request.validation import Bodies

Schema = Mapping[str, Any]

#: Limits that no field of the page shows.
_LIMITS = Limits(model="model", vocab_size=1 << 17, context_tokens=1 << 17, eos_token_ids=())
#: Fields of which only values without an effect are accepted.
_NARROW = frozenset({"modalities"})
_REFUSED, _IGNORED = "Not supported", "Accepted and ignored."

_HEAD = """# Parameters

`make docs` writes this page from the models that check request bodies. It has every field of
OpenAI's API, of Anthropic's and of vLLM.

- **served**: the field does what its meaning says.
- **ignored**: the field is checked and has no effect, as in vLLM: it does not change the answer's
  tokens.
- **refused**: the field asks for another answer than Millrace can give. The error (400,
  `unsupported_parameter`) names the field. The values after *accepts* ask for nothing, so they are
  accepted.

A field that is not on this page is refused as `unknown_parameter`. vLLM would ignore such a field,
even a mistyped `temprature`. `null` is the same as absent. [REST API](api.md) explains the fields;
`/openapi.json` has their types and limits.
"""


def schemas() -> dict[str, Schema]:
    """Returns the JSON schemas of the bodies, by path."""
    bodies, pooled = Bodies(_LIMITS).types, PooledBodies(_LIMITS).types
    models = {
        CHAT: bodies.chat,
        COMPLETIONS: bodies.completion,
        RESPONSES: bodies.response,
        MESSAGES: bodies.message,
        EMBEDDINGS: pooled.embedding,
    }
    return {path: model.json_schema() for path, model in models.items()}


def parameters_page() -> str:
    """docs/reference/parameters.md."""
    clients, vllm = client_fields(), vllm_fields()
    lines = [_HEAD]
    for path, schema in schemas().items():
        owner = "Anthropic" if path == MESSAGES else "OpenAI"
        lines += [
            f"## {path}",
            "",
            f"| field | here | {owner} | vLLM | meaning |",
            "|---|---|---|---|---|",
        ]
        for name, field in _sorted(schema):
            marks = ("x" if name in fields[path] else "" for fields in (clients, vllm))
            cells = (f"`{name}`", standing(name, field), *marks, _meaning(field))
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def standing(name: str, field: Schema) -> str:
    """Returns what becomes of a field: served, ignored or refused."""
    described = field["description"]
    if name in _NARROW or described.startswith(_REFUSED):
        return "refused"
    return "ignored" if described == _IGNORED else "served"


def _sorted(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yields the fields by name: served fields first, refused fields last."""
    order = ("served", "ignored", "refused")
    fields = schema["properties"].items()
    yield from sorted(fields, key=lambda item: (order.index(standing(*item)), item[0]))


def _meaning(field: Schema) -> str:
    described: str = field["description"]
    if described == _IGNORED:
        return ""
    if described.startswith(_REFUSED):
        reason = described.removeprefix(f"{_REFUSED}: ").rstrip(".")
        harmless = [json.dumps(value) for value in field["enum"] if value is not None]
        accepts = f"; accepts {', '.join(f'`{value}`' for value in harmless)}" if harmless else ""
        return (reason + accepts).replace("|", "\\|")
    return described.replace("|", "\\|")
