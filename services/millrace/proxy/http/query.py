"""The parameters of a query, read once and checked by name; and the lists that answer it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from millrace.proxy.errors import bad_field, shown
from millrace.proxy.http.asgi import Scope

#: The most items of a page.
_MOST_ROWS = 100


def query_of(scope: Scope) -> dict[str, str]:
    """Returns the last value of every parameter of the query."""
    found = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return {name: values[-1] for name, values in found.items()}


def flag(query: dict[str, str], name: str) -> bool:
    """Returns a parameter that is true or false. Raises ApiError naming it."""
    text = query.get(name, "false")
    if text not in ("true", "false"):
        raise bad_field(name, f"must be 'true' or 'false', got {shown(text)}.")
    return text == "true"


def number(query: dict[str, str], name: str, default: int, low: int, high: int) -> int:
    """Returns an integer parameter. Raises ApiError naming it."""
    text = query.get(name)
    if text is None:
        return default
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 16 else -1
    if not low <= value <= high:
        raise bad_field(name, f"must be an integer from {low} to {high}, got {shown(text)}.")
    return value


def list_of(rows: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Returns OpenAI's list: a page of objects with ids, and whether more follow."""
    return {
        "object": "list",
        "data": rows,
        "first_id": rows[0]["id"] if rows else None,
        "last_id": rows[-1]["id"] if rows else None,
        "has_more": has_more,
    }


def newest_first(query: dict[str, str]) -> bool:
    """Returns whether `order` is descending, as it is by default. Raises ApiError naming it."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_field("order", f"must be 'asc' or 'desc', got {shown(order)}.")
    return order == "desc"


def page_of(rows: Sequence[Mapping[str, Any]], query: dict[str, str]) -> dict[str, Any]:
    """Returns the page of `rows` that a query wants. Raises ApiError naming the wrong parameter."""
    limit = number(query, "limit", 20, 1, _MOST_ROWS)
    if newest_first(query):
        rows = rows[::-1]
    if (after := query.get("after")) is not None:
        ids = [row["id"] for row in rows]
        if after not in ids:
            raise bad_field("after", f"there is no item {shown(after)}.")
        rows = rows[ids.index(after) + 1 :]
    return list_of(rows[:limit], has_more=len(rows) > limit)
