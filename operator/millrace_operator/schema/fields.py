"""Makes fields of a structural schema, with one function per type; every field has a description.

Structural: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources, "Specifying a
structural schema". Lists, maps and texts are bounded, because the API server estimates the cost of
a CEL rule by the largest possible value.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

#: A number as text: some readers and writers of YAML change floats.
DECIMAL = r"^[0-9]+(\.[0-9]+)?$"
DNS_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


def rule(expression: str, message: str) -> Schema:
    """Makes a CEL rule with the message for users who break it."""
    return {"rule": expression, "message": message}


def text(doc: str, *, longest: int = 253, **more: Any) -> Schema:  # noqa: ANN401 - JSON Schema
    return {"type": "string", "description": doc, "maxLength": longest, **more}


def decimal(doc: str, **more: Any) -> Schema:  # noqa: ANN401
    return text(doc, longest=16, pattern=DECIMAL, **more)


def choice(doc: str, *values: str, default: str) -> Schema:
    return {"type": "string", "description": doc, "enum": list(values), "default": default}


def integer(doc: str, low: int, high: int, **more: Any) -> Schema:  # noqa: ANN401
    return {"type": "integer", "description": doc, "minimum": low, "maximum": high, **more}


def count(doc: str) -> Schema:
    """Makes an integer of a status, without bounds: no user writes it."""
    return {"type": "integer", "description": doc}


def generation(doc: str) -> Schema:
    return {"type": "integer", "format": "int64", "description": doc}


def boolean(doc: str, *, default: bool) -> Schema:
    return {"type": "boolean", "description": doc, "default": default}


def moment(doc: str) -> Schema:
    return {"type": "string", "format": "date-time", "description": doc}


def record(
    doc: str,
    properties: dict[str, Schema],
    *,
    required: tuple[str, ...] = (),
    default: Schema | None = None,
    rules: tuple[Schema, ...] = (),
) -> Schema:
    """Makes an object. An object with rules must not have `{}` as its default.

    The API server checks a default as it is written, before it fills in the fields' defaults: a
    rule that reads a field would find none.
    """
    schema: Schema = {"type": "object", "description": doc, "properties": properties}
    if required:
        schema["required"] = list(required)
    if default is not None:
        schema["default"] = default
    if rules:
        schema["x-kubernetes-validations"] = list(rules)
    return schema


def keyed_list(doc: str, key: str, most: int, item: Schema, **more: Any) -> Schema:  # noqa: ANN401
    """Makes a list whose entries server-side apply merges by `key`."""
    return {
        "type": "array",
        "description": doc,
        "maxItems": most,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": [key],
        "items": item,
        **more,
    }


def pod_template(what: str) -> Schema:
    return {
        "type": "object",
        "description": (
            f"A PodTemplateSpec that is merged over the operator's own for {what}: labels, "
            "annotations and mappings key by key; containers (the main container is `millrace`), "
            "env, volumes, volumeMounts and ports by their names; other fields are replaced."
        ),
        "x-kubernetes-preserve-unknown-fields": True,
    }


def secret_key(doc: str, key: str) -> Schema:
    """Makes a reference to one key of a Secret of the same namespace."""
    return record(
        doc,
        {
            "name": text("Name of a Secret in the same namespace.", minLength=1),
            "key": text("Key of the Secret that holds the value.", minLength=1, default=key),
        },
        required=("name",),
    )
