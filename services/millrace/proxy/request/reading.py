"""Reads bodies by their models, and writes the errors of wrong bodies."""

from __future__ import annotations

import json
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from millrace.proxy.errors import ApiError, bad_field, shown
from millrace.proxy.request.models.fields import UnknownField, quick_validator

#: A body with more errors gets an answer without a field: Pydantic's list of them costs too much.
_MOST_ERRORS = 10_000
#: So does a body with an unknown field and about so many fields: it is not decoded again.
_MOST_FIELDS = 100_000
_LONGEST_PATH = 200  # characters

_NAMES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}
_WANTED = {
    "string_type": "a string",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
}


def read_body(model: TypeAdapter[Any], body: bytes) -> dict[str, Any]:
    """Returns the fields that are not null. Raises ApiError (400), which names the wrong field."""
    try:
        checked = quick_validator(model).validate_json(body)
    except ValidationError as error:
        if error.error_count() > _MOST_ERRORS:
            message = f"The request body has {error.error_count()} wrong fields."
            raise ApiError(400, message, code="invalid_body") from None
        checked = _read_again(model, body)
    except UnknownField as unknown:
        if unknown.certain and body.count(b'":') > _MOST_FIELDS:
            raise _too_many() from None
        checked = _read_again(model, body)
    return {name: value for name, value in checked.items() if value is not None}


def write_body(fields: dict[str, Any]) -> bytes:
    """Returns the JSON of the fields, for `read_body`."""
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError:  # what clients pass on may have integers above 64 bits
        return json.dumps(fields).encode()


def _read_again(model: TypeAdapter[Any], body: bytes) -> dict[str, Any]:
    """Reads a refused body as Python objects, which finds the wrong field.

    Returns the fields if none is wrong: only the first reading refuses 5.0 for an integer, and
    fields of another form of an object that has several.
    """
    decoded = _parse_json(body)
    if not isinstance(decoded, dict):
        raise ApiError(400, "The request body must be a JSON object.", code="invalid_body")
    try:
        checked: dict[str, Any] = quick_validator(model).validate_python(decoded)
    except UnknownField:
        if body.count(b'":') > _MOST_FIELDS:
            raise _too_many() from None
        return _named(model, decoded)
    except ValidationError as error:
        raise _first_error(error, decoded) from None
    return checked


def _too_many() -> ApiError:
    message = f"The request body has unknown fields, and more than {_MOST_FIELDS} fields."
    return ApiError(400, message, code="unknown_parameter")


def _named(model: TypeAdapter[Any], decoded: dict[str, Any]) -> dict[str, Any]:
    """Raises the error of the first wrong field, which may be an unknown field."""
    checked: dict[str, Any]
    try:
        checked = model.validate_python(decoded)
    except ValidationError as error:
        raise _first_error(error, decoded) from None
    return checked


def _first_error(error: ValidationError, body: dict[str, Any]) -> ApiError:
    """Returns the error of the body's first wrong field; missing fields come last."""
    places = {name: place for place, name in enumerate(body)}
    return _api_error(
        min(
            error.errors(include_url=False),
            key=lambda e: (places.get(str(e["loc"][0]), len(places)), e["type"] == "missing"),
        )
    )


def _api_error(error: ErrorDetails) -> ApiError:
    """Translates an error of Pydantic's, or of our own types of fields."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    path = _path(error["loc"])
    if kind == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{path}'.", param=path, code="unknown_parameter")
    if kind == "missing" or (
        value is None and isinstance(error["loc"][-1], str) and kind != "not_within"
    ):
        message = f"Missing required parameter: '{path}'."
        return ApiError(400, message, param=path, code="missing_required_parameter")
    if kind in _WANTED:
        return _wrong_type(path, f"expected {_WANTED[kind]}", value)
    if kind == "invalid_type":
        return _wrong_type(path, error["msg"], value)
    if kind in ("not_within", "not_one_of"):
        if not _has_type(context["wanted"], value):
            return _wrong_type(path, f"expected {context['wanted']}", value)
        return bad_field(path, f"{error['msg']}, got {shown(value)}.{context.get('why', '')}")
    return bad_field(path, *_too_short_or_long(kind, context, error["msg"]))


def _too_short_or_long(kind: str, context: dict[str, Any], message: str) -> tuple[str, str]:
    """Returns message and code."""
    if kind == "string_too_short":
        return f"must have at least {context['min_length']} characters.", "empty_string"
    if kind == "string_too_long":
        return f"must have at most {context['max_length']} characters.", "invalid_value"
    if kind == "too_short":
        return "must not be empty.", "empty_array"
    if kind == "too_long":
        most, got = context["max_length"], context["actual_length"]
        return f"must have at most {most} items, got {got}.", "invalid_value"
    return message, kind


def _has_type(wanted: str, value: object) -> bool:
    if wanted == "a string":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return wanted == "a number" or isinstance(value, int) or value.is_integer()


def _wrong_type(path: str, expected: str, value: object) -> ApiError:
    got = _NAMES.get(type(value), "something else")
    return bad_field(path, f"{expected}, got {got}.", "invalid_type")


def _path(loc: tuple[int | str, ...]) -> str:
    """Returns the path of a field, as `messages[0].content`, without the tags of unions."""
    first, *rest = loc
    path = str(first)
    for item in rest:
        if isinstance(item, int):
            path += f"[{item}]"
        elif not item.startswith("<"):
            path += f".{item}"
    return path[:_LONGEST_PATH]


def _parse_json(body: bytes) -> object:
    """Decodes a body. Raises ApiError (400), which names a field with half a surrogate pair."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if "surrogate" in str(error) and (path := _surrogate_field(body)) is not None:
            raise bad_field(
                path, "the text holds half of a surrogate pair, which is no character."
            ) from None
        raise ApiError(
            400, f"The request body is not valid JSON: {error}", code="invalid_json"
        ) from None


def _surrogate_field(body: bytes) -> str | None:
    """Returns the path of the first string with a lone surrogate; a lenient parser finds it."""
    try:
        return _find_surrogate(json.loads(body), "")
    except (ValueError, RecursionError):
        return None


def _find_surrogate(value: Any, path: str) -> str | None:  # noqa: ANN401
    if isinstance(value, str):
        return path if any("\ud800" <= c <= "\udfff" for c in value) else None
    if isinstance(value, dict):
        for key, item in value.items():
            if _find_surrogate(key, path) is not None:
                return path
            if found := _find_surrogate(item, f"{path}.{key}" if path else key):
                return found
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if found := _find_surrogate(item, f"{path}[{i}]"):
                return found
    return None
