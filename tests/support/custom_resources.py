"""ModelServices and pools as the API server returns them: with the CRDs' defaults filled in."""

from __future__ import annotations

import copy
from typing import Any

from millrace_operator.schema import API_VERSION
from millrace_operator.schema.crds import definitions
from millrace_operator.spec import Defaults

NAMESPACE = "llm"
DEFAULTS = Defaults(
    images={
        role: f"millrace-{role}:0.1.0"
        for role in ("proxy", "scheduler", "prefill", "decode", "kvp")
    },
    redis_secret="millrace-redis",
)

SCHEMAS: dict[str, dict[str, Any]] = {
    crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for crd in definitions()
}


def defaulted(schema: dict[str, Any], value: Any) -> Any:
    """Fills in a value's defaults (structural defaulting), from the outside in."""
    if isinstance(value, dict):
        fields = schema.get("properties", {})
        missing = {k: f["default"] for k, f in fields.items() if k not in value and "default" in f}
        value = {**value, **copy.deepcopy(missing)}
        extra = schema.get("additionalProperties", {})
        return {k: defaulted(fields.get(k, extra), v) for k, v in value.items()}
    if isinstance(value, list):
        return [defaulted(schema.get("items", {}), entry) for entry in value]
    return value


def resource(kind: str, name: str, spec: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """Returns an object with its defaults."""
    found = {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": f"uid-of-{name}",
            "generation": 1,
            **metadata,
        },
        "spec": copy.deepcopy(spec),
    }
    return defaulted(SCHEMAS[kind], found)


def model_service(name: str = "chat", **spec: Any) -> dict[str, Any]:
    """A ModelService; fields of its spec are replaced by name, and left out where they are None."""
    base: dict[str, Any] = {
        "model": {"name": "chat", "uri": "/models/chat"},
        "prefill": {},
        "decode": {},
    }
    given = {field: value for field, value in (base | spec).items() if value is not None}
    return resource("ModelService", name, given)


def pool(kind: str = "DecodePool", name: str = "chat-decode", **spec: Any) -> dict[str, Any]:
    """A pool of the service `chat`, made by hand."""
    return resource(kind, name, {"serviceRef": {"name": "chat"}} | spec)
