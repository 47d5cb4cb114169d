"""The routes that speak Anthropic's API: errors and the request's id have its form there."""

from __future__ import annotations

from millrace.proxy.errors import ApiError

MESSAGES_PATH = "/v1/messages"
COUNT_PATH = MESSAGES_PATH + "/count_tokens"

#: The header with the request's id, beside OpenAI's.
REQUEST_ID = b"request-id"


def is_anthropic(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def error_body(path: str, error: ApiError) -> bytes:
    """Returns the JSON document of an error, in the form of the API that the path belongs to."""
    return error.anthropic_body() if is_anthropic(path) else error.body()
