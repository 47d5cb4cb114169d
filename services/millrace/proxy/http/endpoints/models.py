"""/v1/models and /tokenizer_info: the served models that the key may use, and their tokenizers.

Models are shown as OpenAI's API does; the header `anthropic-version` asks for Anthropic's form.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from millrace.proxy.errors import bad_field, shown
from millrace.proxy.http.anthropic import wants_anthropic
from millrace.proxy.http.asgi import Receive, Scope, Send, send_document, send_json
from millrace.proxy.http.query import number, query_of
from millrace.proxy.http.tenants import exchange_of
from millrace.proxy.models.models import Models
from millrace.proxy.models.served_model import ServedModel

MODELS_PATH = "/v1/models"
MODEL_PATH = MODELS_PATH + "/{model}"
TOKENIZER_PATH = "/tokenizer_info"

MOST_LISTED = 1000

Json = dict[str, Any]


class ModelEndpoints:
    """Lists and shows the models. The answers raise ApiError before anything was sent."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def list(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent."""
        del receive  # a GET
        allowed = self._models.names_for(exchange_of(scope).caller)
        if wants_anthropic(scope):
            rows = [_as_anthropic(name, model) for name, model in allowed]
            return await send_document(send, _page(rows, query_of(scope)))
        data = [_as_openai(name, model) for name, model in allowed]
        return await send_document(send, {"object": "list", "data": data})

    async def show(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent."""
        del receive  # a GET
        name: str = scope["path_params"]["model"]
        found = self._models.find(name, exchange_of(scope).caller)
        as_document = _as_anthropic if wants_anthropic(scope) else _as_openai
        return await send_document(send, as_document(name, found))

    async def tokenizer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Without the parameter `model`: the first model."""
        del receive  # a GET
        name = query_of(scope).get("model", self._models.first.name)
        found = self._models.find(name, exchange_of(scope).caller)
        await send_json(send, 200, found.tokenizer_info)
        return 200


def _as_openai(name: str, model: ServedModel) -> Json:
    """Returns what clients see of a model; `root` is its own name, where `name` is an alias."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "millrace",
        "root": model.name,
        "max_model_len": model.limits.context_tokens,
    }


def _as_anthropic(name: str, model: ServedModel) -> Json:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": f"{datetime.fromtimestamp(model.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
        "max_input_tokens": model.limits.context_tokens,
    }


def _page(rows: list[Json], query: dict[str, str]) -> Json:
    """Returns the rows after `after_id` or before `before_id`, `limit` at most."""
    limit = number(query, "limit", 20, 1, MOST_LISTED)
    after, before = _place(rows, query, "after_id"), _place(rows, query, "before_id")
    if before is not None:
        if after is not None:
            raise bad_field("before_id", "can't be given beside after_id.")
        begin, end = max(0, before - limit), before
        has_more = begin > 0
    else:
        begin = 0 if after is None else after + 1
        end = begin + limit
        has_more = end < len(rows)
    page = rows[begin:end]
    return {
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }


def _place(rows: list[Json], query: dict[str, str], name: str) -> int | None:
    """Returns where the row is that a parameter names. Raises ApiError naming the parameter."""
    if (wanted := query.get(name)) is None:
        return None
    for place, row in enumerate(rows):
        if row["id"] == wanted:
            return place
    raise bad_field(name, f"must be the id of a model of the list, got {shown(wanted)}.")
