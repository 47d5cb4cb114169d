"""The routes that speak Anthropic's API: errors and the request's id have its form there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.proxy.errors import ApiError

MESSAGES_PATH = "/v1/messages"
COUNT_PATH = MESSAGES_PATH + "/count_tokens"

#: Where Anthropic's API makes batches; here messages have batches of OpenAI's API.
_BATCHES_PATH = MESSAGES_PATH + "/batches"

#: The routes that both APIs have: a request with this header is of Anthropic's.
_SHARED_PATH = "/v1/models"
VERSION = b"anthropic-version"

#: The header with the request's id, beside OpenAI's.
REQUEST_ID = b"request-id"


def wants_anthropic(scope: Mapping[str, Any]) -> bool:
    """Returns whether the answer to this request has the form of Anthropic's API."""
    path: str = scope["path"]
    if _is_under(_SHARED_PATH, path):
        return any(name == VERSION for name, _ in scope["headers"])
    return _is_under(MESSAGES_PATH, path)


def _is_under(root: str, path: str) -> bool:
    return path == root or path.startswith(root + "/")


def no_route(method: str, path: str) -> str:
    """Returns the message for a route that there is not."""
    if _is_under(_BATCHES_PATH, path):
        return (
            f"No route {method} {path}: send the requests as a file to /v1/batches, with the "
            f"endpoint {MESSAGES_PATH!r}."
        )
    return f"No route {method} {path}."


def error_body(scope: Mapping[str, Any], error: ApiError) -> bytes:
    """Returns the JSON document of an error, in the form of the API that the request is of."""
    return error.anthropic_body() if wants_anthropic(scope) else error.body()
