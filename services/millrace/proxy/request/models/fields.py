"""Types of fields for the models of request bodies, beyond Pydantic's own.

All types are strict: a text is no number. A type may have two schemas. The first is quick and reads
JSON. The second reads Python objects, if `reading` has to find out why the first refused a body.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, SchemaValidator
from pydantic_core import core_schema as core
from typing_extensions import TypedDict

from millrace.proxy.errors import shown

Schema = dict[str, Any]
T = TypeVar("T")
#: The type of a body.
Adapter = TypeAdapter[dict[str, Any]]

#: Levels of arrays and objects: readers of such JSON (a chat template, a log) recurse.
MOST_LEVELS = 100

#: Refuses unknown fields and values of another type.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class UnknownField(Exception):
    """A quick reading met an unknown field. `certain`: no other form of its object may have it."""

    def __init__(self, *, certain: bool) -> None:
        super().__init__()
        self.certain = certain


def adapter(name: str, body: type, **fields: Any) -> Adapter:  # noqa: ANN401
    """Returns the adapter of a body: `fields`, which have limits of one server, and its own."""
    make: Any = TypedDict  # mypy knows only a TypedDict whose fields stand beside it
    types = {**fields, **get_type_hints(body, include_extras=True)}
    return TypeAdapter(with_config(STRICT)(make(name, types, total=False)))


@lru_cache(maxsize=128)
def quick_validator(model: TypeAdapter[Any]) -> SchemaValidator:
    """Returns a validator that reads as `model` does, but raises UnknownField at the first."""
    return SchemaValidator(_quick(model.core_schema))


def _quick(schema: Any, *, certain: bool = True) -> Any:  # noqa: ANN401 - a part of a schema
    """Returns the schema with objects that raise UnknownField; Pydantic collects all errors."""
    if isinstance(schema, list):
        return [_quick(part, certain=certain) for part in schema]
    if not isinstance(schema, dict):
        return schema
    certain = certain and schema.get("type") != "union"
    found = {k: _quick(v, certain=certain) for k, v in schema.items() if k != "metadata"}
    if found.get("type") == "typed-dict":

        def refuse(value: object) -> object:
            raise UnknownField(certain=certain)

        config = found.get("config", {})
        found["config"] = {k: v for k, v in config.items() if k != "extra_fields_behavior"}
        found["extra_behavior"] = "allow"
        found["extras_schema"] = core.no_info_plain_validator_function(refuse)
    return found


@dataclass(frozen=True, slots=True)
class Within:
    """Limits a number to [low, high]; `above` excludes `low`. The error names both ends.

    5.0 is an integer, as in JSON Schema.
    """

    low: float
    high: float
    above: bool = False

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        limits: dict[str, Any] = {"gt" if self.above else "ge": self.low, "le": self.high}
        number: CoreSchema = core.float_schema(**limits, strict=True, allow_inf_nan=False)
        named, wanted = number, "a number"
        kinds = (source, *get_args(source))
        if int in kinds:
            number = core.int_schema(**limits, strict=True)
            from_float = core.chain_schema(
                [core.float_schema(strict=True), core.int_schema(**limits, strict=False)]
            )
            named, wanted = core.union_schema([number, from_float]), "an integer"
        low = "above" if self.above else "at least"
        named = core.custom_error_schema(
            named,
            custom_error_type="not_within",
            custom_error_message=f"must be {low} {self.low} and at most {self.high}",
            custom_error_context={"wanted": wanted},
        )
        schema = core.json_or_python_schema(json_schema=number, python_schema=named)
        return core.nullable_schema(schema) if type(None) in kinds else schema


class OneType:
    """A field of one of several `types`. `choose` returns the tag of a value's type, or None.

    `tagged_by` names the field of the objects that is the tag, if there is one: the quick schema
    tries all types of JSON without it, and a field that only a later type has is read twice.
    """

    def __init__(
        self,
        choose: Callable[[Any], str | None],
        wanted: str,
        tagged_by: str = "",
        **types: object,
    ) -> None:
        self._choose = choose
        self._tagged_by = tagged_by
        self._wanted = wanted
        self._types = types

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        found = {tag: handler.generate_schema(t) for tag, t in self._types.items()}
        schemas = {f"<{tag}>": schema for tag, schema in found.items()}
        quick: CoreSchema = core.union_schema(list(found.values()), mode="left_to_right")
        if self._tagged_by:
            quick = core.tagged_union_schema(found, self._tagged_by)
        return core.json_or_python_schema(
            json_schema=quick,
            python_schema=core.tagged_union_schema(
                schemas,
                lambda value: f"<{self._choose(value)}>",
                custom_error_type="invalid_type",
                custom_error_message=f"expected {self._wanted}",
            ),
        )


def text_or_array(array: object, items: str, *, text: object = str) -> OneType:
    """Returns a field that is a string, of type `text`, or an array of `items`, of type `array`."""
    return OneType(_text_or_array, f"a string or an array of {items}", text=text, array=array)


def _text_or_array(value: object) -> str | None:
    return "text" if isinstance(value, str) else "array" if isinstance(value, list) else None


def text_or_object(value: object) -> str | None:
    """Returns the tag of a field that is a string or an object."""
    return "text" if isinstance(value, str) else "object" if isinstance(value, dict) else None


def wrong_field(name: str, kind: str | PydanticCustomError, value: object) -> ValidationError:
    """Returns the error `kind` (a type of Pydantic's or our own) of the field `name` of `value`."""
    details = InitErrorDetails(type=kind, loc=(name,), input=value)
    return ValidationError.from_exception_data("", [details])


def kind_of_part(part: object) -> str:
    """Returns the tag of a part of a message's content: "text" or "refusal"."""
    return "refusal" if isinstance(part, dict) and part.get("type") == "refusal" else "text"


def of_types(
    kinds: tuple[str, ...],
    what: str,
    default: str | None = None,
    code: str = "unsupported_content_type",
) -> BeforeValidator:
    """Refuses objects whose `type` is not one of `kinds`, by an error with `code`."""

    def check(value: object) -> object:
        if isinstance(value, dict) and value.get("type", default) not in kinds:
            known = ", ".join(map(repr, kinds))
            message = f"{what} must be one of {known}, got {shown(value.get('type'))}."
            kind = PydanticCustomError(code, message)
            raise wrong_field("type", kind, value)
        return value

    return BeforeValidator(check)


def one_of_types(what: str, default: str | None = None, **types: object) -> object:
    """Returns a type: an object of one of `types`, by its field `type`, or else of `default`."""

    def kind(value: object) -> str | None:
        return str(value.get("type", default)) if isinstance(value, dict) else None

    return Annotated[
        Any,
        OneType(kind, "an object", tagged_by="type", **types),
        of_types(tuple(types), what, default, code="invalid_value"),
    ]


class OneOf:
    """Limits a string to fixed choices. `why` explains in the error why others are refused."""

    def __init__(self, *choices: str, why: str = "") -> None:
        self._choices = choices
        self._why = why

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core.custom_error_schema(
            core.literal_schema(list(self._choices)),
            custom_error_type="not_one_of",
            custom_error_message="must be one of " + ", ".join(map(repr, self._choices)),
            custom_error_context={"wanted": "a string", "why": self._why},
        )


class Unsupported:
    """A field of OpenAI's API or of vLLM that Millrace does not support.

    Values in `harmless` have no effect and are accepted. `why` is for the documentation.
    """

    def __init__(self, *harmless: object, why: str = "") -> None:
        self._harmless = (None, *harmless)
        self._why = why

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: object) -> Schema:
        description = f"Not supported: {self._why}." if self._why else "Not supported."
        return {"enum": list(self._harmless), "description": description}

    def _check(self, value: object) -> object:
        if any(type(value) is type(asked) and value == asked for asked in self._harmless):
            return value
        message = f"is not supported by this server, got {shown(value)}."
        raise PydanticCustomError("unsupported_parameter", message)


#: A field that is checked and has no effect, as in vLLM.
Ignored = Annotated[T | None, Field(description="Accepted and ignored.")]


def _check_object(value: dict[str, Any]) -> dict[str, Any]:
    if not _all_finite(value):
        raise ValueError("JSON has no NaN and no infinity")  # but Pydantic's parser reads them
    return value


def _check_json_text(text: str) -> str:
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        return text  # models write such arguments; chat templates show them unchanged
    _all_finite(value)
    return text


def _all_finite(value: object) -> bool:
    """Whether all numbers are finite. Raises an error if JSON is nested deeper than MOST_LEVELS."""
    level, finite = [value], True
    for _ in range(MOST_LEVELS):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return finite
        finite = finite and all(map(math.isfinite, (i for i in level if isinstance(i, float))))
    if any(isinstance(item, dict | list) for item in level):
        raise _too_deep()
    return finite


def _too_deep() -> PydanticCustomError:
    message = f"its JSON must be nested at most {MOST_LEVELS} levels deep, got more."
    return PydanticCustomError("invalid_value", message)


#: An object with any content, nested MOST_LEVELS deep at most.
AnyObject = Annotated[dict[str, Any], AfterValidator(_check_object)]
#: A string that should hold JSON, nested MOST_LEVELS deep at most; other text is accepted.
JsonText = Annotated[str, AfterValidator(_check_json_text)]
