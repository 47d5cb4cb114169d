"""The base of the models that describe and parse custom objects and the chart's values.

A model's docstring describes its section to users, and `structural` turns the model into a
structural schema (https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources, "Specifying
a structural schema"). Lists, maps and texts are bounded, because the API server estimates the cost
of a CEL rule by the largest possible value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema

Schema = dict[str, Any]

DNS_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

Text = Annotated[str, Field(max_length=253)]
#: A number as text: some readers and writers of YAML change floats.
Decimal = Annotated[str, Field(max_length=16, pattern=r"^[0-9]+(\.[0-9]+)?$")]
NonEmpty = Annotated[Text, Field(min_length=1)]
SecretKey = Annotated[NonEmpty, Field(description="Key of the Secret that holds the value.")]
Port = Annotated[int, Field(ge=1, le=65535)]
PodTemplate = Annotated[
    Mapping[str, Any],
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]


class Record(BaseModel):
    """A section of a custom object or of the chart's values."""

    model_config = ConfigDict(
        frozen=True, strict=True, alias_generator=to_camel, validate_default=True
    )
    rules: ClassVar[tuple[Schema, ...]] = ()  # in CEL
    partial: ClassVar[bool] = False  # whether a field without a default may be left out, too

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> Schema:
        found = handler(core_schema)
        schema = handler.resolve_ref_schema(found)
        if cls.rules:
            schema["x-kubernetes-validations"] = list(cls.rules)
        if cls.partial:
            schema.pop("required", None)
        return found


class Partial(Record):
    """A section whose fields may all be left out: a status, or values."""

    partial = True


def rule(expression: str, message: str) -> Schema:
    """Makes a CEL rule with the message for users who break it."""
    return {"rule": expression, "message": message}


def doc(text: str, default: Any = ..., **limits: Any) -> Any:  # noqa: ANN401 - of any type
    """Makes a field with its description; without a default the field is required."""
    return Field(default, description=text, **limits)


def section(**default: object) -> Any:  # noqa: ANN401
    """Makes a field for a model whose fields have defaults.

    The API server checks a default as it is written, before it fills in the fields' defaults: a
    rule that reads a field would find none. So `default` names the fields that rules read.
    """
    return Field(default)


def empty(model: type[Record]) -> Any:  # noqa: ANN401
    """Makes a field for a section that may be absent, and then reads as an empty section."""
    nothing = model.model_validate({})
    return Field(default_factory=lambda: nothing)


def keyed_list(text: str, key: str, most: int, default: Any = ..., **limits: Any) -> Any:  # noqa: ANN401
    """Makes a field for a list whose entries server-side apply merges by `key`."""
    keys = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return doc(text, default, max_length=most, strict=False, json_schema_extra=keys, **limits)


def pod_template(what: str) -> Any:  # noqa: ANN401
    """Makes a field for a user's pod template."""
    return doc(
        f"A PodTemplateSpec that is merged over the operator's own for {what}: labels, "
        "annotations and mappings key by key; containers (the main container is `millrace`), "
        "env, volumes, volumeMounts and ports by their names; other fields are replaced.",
        None,
    )


class SecretRef(Record):
    """A key of a Secret in the same namespace."""

    name: NonEmpty = doc("Name of a Secret in the same namespace.")
    key: SecretKey


def structural(model: type[BaseModel]) -> Schema:
    """Returns the model's schema in the form that the API server takes."""
    schema = model.model_json_schema()
    return _inlined(schema, schema.pop("$defs", {}))


def _inlined(node: Schema, models: Mapping[str, Schema]) -> Schema:
    """Replaces references by the models, and a field that may be None by one that may be absent."""
    if "anyOf" in node:
        (present,) = (choice for choice in node["anyOf"] if choice != {"type": "null"})
        node = {**present, **{name: value for name, value in node.items() if name != "anyOf"}}
    if "$ref" in node:
        node = {**models[node["$ref"].rpartition("/")[2]], **node}
    unset = ("default", None)
    found = {k: v for k, v in node.items() if k not in ("$ref", "title") and (k, v) != unset}
    if "description" in found:
        found["description"] = " ".join(found["description"].split())
    if "properties" in found:
        found["properties"] = {k: _inlined(v, models) for k, v in found["properties"].items()}
    for name in found.keys() & {"items", "additionalProperties"}:
        found[name] = _inlined(found[name], models)
    return found
