"""The errors that clients get: an HTTP status and OpenAI's error object, or Anthropic's."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import orjson

from millrace.core.errors import MillraceError
from millrace.core.scheduler.effects import Fail, Refuse
from millrace.state.store import StoreError

INVALID = "invalid_request_error"
SERVER = "server_error"

RETRY_AFTER_S = 1.0

#: The header of an error that stays: OpenAI's clients don't send the request again.
NO_RETRY = (b"x-should-retry", b"false")

#: HTTP statuses of the scheduler's refusals, by their code.
_REFUSALS = {"overloaded": 429, "unavailable": 503, "too_large": 400, "invalid": 400}

#: The types of errors in Anthropic's API, by status, if they are not those of 400 and of 500.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

#: Longest piece of the client's own input that a message repeats.
_ECHO_CHARACTERS = 80

#: Python's own repr fails for JSON that is nested as deeply as a body may be.
_SHALLOW = reprlib.Repr()
_SHALLOW.maxlevel = 4
_SHALLOW.maxstring = _SHALLOW.maxother = _SHALLOW.maxlong = 4 * _ECHO_CHARACTERS


class ApiError(MillraceError):
    """Ends a request with `status` and `{"error": {"message", "type", "param", "code"}}`.

    `param` is the path of the wrong field (`messages[2].content`), or None if no field is wrong.
    `retry_after_s` becomes a Retry-After header, beside `headers`. `kind` is the error's type; the
    default depends on the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        kind: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.kind = kind
        self.more_headers = headers

    @property
    def type(self) -> str:
        if self.kind is not None:
            return self.kind
        if self.status == 429:
            return "rate_limit_error"
        return INVALID if self.status < 500 else SERVER

    @property
    def is_refusal(self) -> bool:
        """Whether the request may succeed later, unchanged."""
        return self.status in (429, 503)

    def body(self) -> bytes:
        """Returns the JSON document of the error."""
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def anthropic_body(self) -> bytes:
        """Returns the JSON document of the error as Anthropic's API has it."""
        kind = _ANTHROPIC_TYPES.get(self.status, INVALID if self.status < 500 else "api_error")
        if self.code == "overloaded":
            kind = "overloaded_error"
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": self.message}})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers of a response that holds only this error."""
        headers = [(b"content-type", b"application/json"), *self.more_headers]
        if self.retry_after_s is not None:
            seconds = max(1, math.ceil(self.retry_after_s))
            headers.append((b"retry-after", b"%d" % seconds))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def bad_field(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Returns a 400 error that names the field `param`."""
    return ApiError(400, f"Invalid '{param}': {message}", param=param, code=code)


def unavailable(message: str) -> ApiError:
    """Returns a 503 error: the client may try again soon."""
    return ApiError(503, message, code="unavailable", retry_after_s=RETRY_AFTER_S)


@contextmanager
def reachable(kept: str) -> Iterator[None]:
    """Makes the error of a store a 503 error; `kept` is what the store keeps."""
    try:
        yield
    except StoreError as error:
        raise unavailable(f"The store of {kept} does not answer: {error}") from error


def overloaded(message: str) -> ApiError:
    """Returns a 429 error: the server has too many requests."""
    return ApiError(429, message, code="overloaded", retry_after_s=RETRY_AFTER_S)


#: The code of `id_taken`.
ID_TAKEN = "request_id_taken"


def id_taken() -> ApiError:
    """Returns a 409 error: a request of this id is known, and its answer is not this client's."""
    return ApiError(409, "A request with this id exists already.", code=ID_TAKEN)


def would_be_late(predicted_s: float, objective_s: float) -> ApiError:
    """Returns a 429 error for a client that wants no late answer. Times are TTFT, in seconds."""
    return ApiError(
        429,
        f"The first token is predicted after {predicted_s:.3f} s; the objective is "
        f"{objective_s:g} s.",
        code="would_be_late",
        retry_after_s=predicted_s - objective_s,
        headers=[(b"x-millrace-predicted-ttft-ms", b"%d" % round(predicted_s * 1000))],
    )


def refusal(refused: Refuse) -> ApiError:
    """Returns the client's error for a refusal of the scheduler."""
    status = _REFUSALS.get(refused.code, 503)
    retry_after_s = None if status == 400 else refused.retry_after_s or RETRY_AFTER_S
    return ApiError(status, refused.message, code=refused.code, retry_after_s=retry_after_s)


def failure(failed: Fail) -> ApiError:
    """Returns the client's error for a request that the scheduler has given up."""
    message = failed.message or "The request failed."
    if failed.quarantined:
        return ApiError(500, message, code="quarantined", headers=[NO_RETRY])
    return ApiError(500, message, code="failed")


def shown(value: object) -> str:
    """Returns `value` of the client's input as messages show it: short, on one line."""
    text = _SHALLOW.repr(value)
    return text if len(text) <= _ECHO_CHARACTERS else text[: _ECHO_CHARACTERS - 3] + "..."
