"""The routes that speak Anthropic's API: errors and the request's id have its form there."""

from __future__ import annotations

from millrace.proxy.errors import ApiError

MESSAGES_PATH = "/v1/messages"
COUNT_PATH = MESSAGES_PATH + "/count_tokens"

#: Where Anthropic's API makes batches; here messages have batches of OpenAI's API.
_BATCHES_PATH = MESSAGES_PATH + "/batches"

#: The header with the request's id, beside OpenAI's.
REQUEST_ID = b"request-id"


def is_anthropic(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def no_route(method: str, path: str) -> str:
    """Returns the message for a route that there is not."""
    if (path + "/").startswith(_BATCHES_PATH + "/"):
        return (
            f"No route {method} {path}: send the requests as a file to /v1/batches, with the "
            f"endpoint {MESSAGES_PATH!r}."
        )
    return f"No route {method} {path}."


def error_body(path: str, error: ApiError) -> bytes:
    """Returns the JSON document of an error, in the form of the API that the path belongs to."""
    return error.anthropic_body() if is_anthropic(path) else error.body()
