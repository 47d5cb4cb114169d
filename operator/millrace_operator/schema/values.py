"""The schema of the chart's values: `python -m millrace_operator.schema.values FILE` writes it.

The values of a ModelService have the custom resource's own schema; the other values are described
here. Helm reads the file as JSON Schema; defaults stand in values.yaml, where users look for them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from millrace_operator.schema import pools, service
from millrace_operator.schema.fields import Schema, boolean, integer, record, text
from millrace_operator.schema.platform_values import (
    items,
    opaque,
    placement,
    platform,
    quantity,
    texts,
)

#: Keywords that JSON Schema does not know, and defaults, which values.yaml has.
_STRUCTURAL_ONLY = (
    "default",
    "x-kubernetes-validations",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
)


def _closed(schema: Schema) -> Schema:
    """Returns JSON Schema that refuses fields which the API server would silently drop."""
    kept = {name: value for name, value in schema.items() if name not in _STRUCTURAL_ONLY}
    if "properties" in kept:
        kept["properties"] = {name: _closed(field) for name, field in kept["properties"].items()}
        kept.setdefault("additionalProperties", False)
    if "items" in kept:
        kept["items"] = _closed(kept["items"])
    return kept


def _part() -> dict[str, Schema]:
    """Returns the values that make the pod template of one part of the ModelService."""
    return {
        **placement(),
        "topologySpreadConstraints": items(
            "As of a pod; the default labelSelector selects the pods of this part."
        ),
        "runtimeClassName": text("RuntimeClass of the pods."),
        "podLabels": texts("Labels of the pods."),
        "template": opaque(
            "A PodTemplateSpec that is merged over the template of the other values."
        ),
    }


def _pool(kind: pools.Kind) -> Schema:
    rdma = record(
        "RDMA devices for the transfer of KV.",
        {
            "enabled": boolean("Whether instances get RDMA devices.", default=False),
            "resource": text("The device plugin's extended resource.", pattern="^[^/]+/[^/]+$"),
            "count": integer("Units of the resource per instance.", 1, 64),
            "ipcLock": boolean(
                "Adds the capability IPC_LOCK and runs as root, to pin memory.", default=True
            ),
        },
    )
    hugepages = record(
        "Huge pages, mounted at /dev/hugepages.",
        {
            "size": {"type": "string", "description": "Size of a page.", "enum": ["2Mi", "1Gi"]},
            "amount": quantity("Memory in huge pages per instance."),
        },
    )
    section = pools.section(kind)
    own = {**section["properties"], "rdma": rdma, "hugepages": hugepages, **_part()}
    if kind is pools.KVP:
        own["enabled"] = boolean("Whether the release has this pool.", default=False)
    return record(section["description"], own)


def _service() -> dict[str, Schema]:
    """Returns the values that make the ModelService."""
    spec = service.service_spec()["properties"]
    model, weights, gateway = spec["model"], spec["weights"], spec["gateway"]
    del model["required"]
    for name in ("name", "uri"):  # empty: no ModelService
        del model["properties"][name]["minLength"]
    model["properties"]["uri"]["pattern"] = "^(/.*|[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+)?$"
    weights["maxProperties"] = 1
    kept = ("sloClasses", "slo", "scheduling", "settings", "paused")
    return {
        "model": model,
        "weights": weights,
        **{name: spec[name] for name in kept},
        "gateway": record(gateway["description"], {**gateway["properties"], **_part()}),
        "scheduler": record(spec["scheduler"]["description"], _part()),
        **{kind.role: _pool(kind) for kind in pools.KINDS},
    }


def schema() -> dict[str, Any]:
    """Returns values.schema.json."""
    values = record(
        "Values of the chart millrace.",
        {
            "nameOverride": {
                "type": "string",
                "description": "Name that replaces the release's name.",
                "pattern": "^([a-z]([-a-z0-9]{0,38}[a-z0-9])?)?$",
            },
            **_service(),
            **platform(),
            "global": opaque("Values of a parent chart; not used."),
        },
    )
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_closed(values)}


def as_file() -> str:
    """Returns the file's text."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_file(), encoding="utf-8")
