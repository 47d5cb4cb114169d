"""The lines of a batch's files: requests in, results out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from millrace.core.errors import MillraceError
from millrace.proxy.batches.batch import Usage
from millrace.proxy.errors import NO_RETRY, ApiError, shown

Json = dict[str, Any]

#: Bytes of a line beside its body: the other fields.
_FRAME_BYTES = 64 << 10
_LONGEST_ID = 512


class LineError(MillraceError):
    """A line is no request. `code` and `param` are those of OpenAI's errors of batches."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def document(self, line: int | None) -> Json:
        """Returns an entry of the batch's `errors`."""
        return {"code": self.code, "message": self.message, "param": self.param, "line": line}


@dataclass(frozen=True, slots=True)
class Line:
    """The next line of an input, which ends before byte `end`; `text` is empty at a blank line."""

    text: bytes
    end: int


async def split(
    pieces: AsyncIterator[bytes], start: int, most_body_bytes: int
) -> AsyncGenerator[Line, None]:
    """Yields the lines of `pieces`, which begin at byte `start`.

    Raises LineError for a line that is too long; at most a line and a piece are in memory.
    """
    held, end = b"", start
    most = most_body_bytes + _FRAME_BYTES
    async for piece in pieces:
        *complete, held = (held + piece).split(b"\n")
        for text in complete:
            end += len(text) + 1
            yield Line(_checked(text, most), end)
        _checked(held, most)
    if held:
        yield Line(held.strip(), end + len(held))


def _checked(text: bytes, most: int) -> bytes:
    if len(text) > most:
        raise LineError("line_too_long", f"This line is longer than {most} bytes.")
    return text.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRequest:
    """A request of a batch; `body` is the JSON body of its endpoint."""

    custom_id: str
    model: str
    body: Json


def read_request(text: bytes, endpoint: str) -> LineRequest:
    """Returns the request of a line. Raises LineError, which names the field."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        message = "This line is not parseable as valid JSON."
        raise LineError("invalid_json_line", message) from None
    if not isinstance(fields, dict):
        raise LineError("invalid_json_line", "This line is not a JSON object.")
    custom_id = _custom_id(fields)
    method = _field(fields, "method", str)
    if method != "POST":
        raise LineError(
            "invalid_method", f"'method' must be 'POST', got {shown(method)}.", "method"
        )
    url = _field(fields, "url", str)
    if url != endpoint:
        message = f"'url' must be the batch's endpoint, {endpoint!r}, got {shown(url)}."
        raise LineError("invalid_url", message, "url")
    body = _field(fields, "body", dict)
    return LineRequest(custom_id=custom_id, model=_field(body, "model", str, "body."), body=body)


def _custom_id(fields: Json) -> str:
    custom_id = str(_field(fields, "custom_id", str))
    if not 0 < len(custom_id) <= _LONGEST_ID:
        message = f"'custom_id' must have 1 to {_LONGEST_ID} characters."
        raise LineError("invalid_custom_id", message, "custom_id")
    try:
        custom_id.encode()
    except UnicodeEncodeError:  # no line of a result could hold it
        message = "'custom_id' holds half of a surrogate pair, which is no character."
        raise LineError("invalid_custom_id", message, "custom_id") from None
    return custom_id


def _field(fields: Json, name: str, wanted: type, path: str = "") -> Any:  # noqa: ANN401
    """Returns a field of the wanted type."""
    if name not in fields:
        message = f"Missing required parameter: '{path}{name}'."
        raise LineError("missing_required_parameter", message, path + name)
    value = fields[name]
    if not isinstance(value, wanted):
        kind = "an object" if wanted is dict else "a string"
        message = f"'{path}{name}' must be {kind}, got {shown(value)}."
        raise LineError("invalid_type", message, path + name)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the endpoint said to a request of a batch.

    `hopeless`: the same refusal would follow however often the request is sent.
    """

    status: int
    request_id: str | None
    body: bytes
    hopeless: bool = False

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def again(self) -> bool:
        """Whether the request may succeed later, unchanged."""
        return self.status in (429, 503) and not self.hopeless


def answer_of(error: ApiError, body: bytes) -> Answer:
    """Returns the answer of an endpoint that refused the request with this body."""
    hopeless = NO_RETRY in error.more_headers
    return Answer(status=error.status, request_id=None, body=body, hopeless=hopeless)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A line of the output file (`ok`) or of the error file."""

    ok: bool
    text: bytes
    usage: Usage


def result_of(batch_id: str, number: int, custom_id: str, answer: Answer) -> Result:
    """Returns the line of a request that was answered."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": orjson.Fragment(answer.body),
    }
    text = _line(batch_id, number, custom_id, response, None)
    return Result(ok=answer.ok, text=text, usage=_usage(answer.body) if answer.ok else Usage())


def expired(batch_id: str, number: int, custom_id: str) -> Result:
    """Returns the line of a request that was not answered within the completion window."""
    message = "This request could not be executed before the completion window expired."
    error = {"code": "batch_expired", "message": message}
    return Result(ok=False, text=_line(batch_id, number, custom_id, None, error), usage=Usage())


def _line(
    batch_id: str, number: int, custom_id: str, response: Json | None, error: Json | None
) -> bytes:
    digest = hashlib.sha256(f"{batch_id} {number}".encode()).hexdigest()
    return orjson.dumps(
        {
            "id": f"batch_req_{digest[:32]}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
    )


def _usage(body: bytes) -> Usage:
    """Returns the tokens that an answer of any endpoint counts.

    Messages count cached tokens apart from `input_tokens`; the others count them among these.
    """
    usage = orjson.loads(body).get("usage") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    said = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    apart = usage.get("cache_read_input_tokens") or 0
    return Usage(
        input_tokens=usage.get("prompt_tokens", usage.get("input_tokens", 0)) + apart,
        cached_tokens=(details.get("cached_tokens") or 0) + apart,
        output_tokens=usage.get("completion_tokens", usage.get("output_tokens", 0)),
        reasoning_tokens=said.get("reasoning_tokens") or 0,
    )
