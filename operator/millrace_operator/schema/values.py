"""The schema of the chart's values: `python -m millrace_operator.schema.values FILE` writes it.

The values of a ModelService are the custom resource's own models. Helm reads the file as JSON
Schema; defaults stand in values.yaml, where users look for them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from millrace_operator.schema import platform_values as platform
from millrace_operator.schema import service
from millrace_operator.schema.gateway import Gateway
from millrace_operator.schema.platform_values import Opaque, Opaques, Pods, Quantity, Texts
from millrace_operator.schema.pools import Decode, Kvp, Prefill
from millrace_operator.schema.record import Partial, Schema, Text, doc, structural


class PartValues(Pods):
    """The values that make the pod template of one part of the ModelService."""

    topology_spread_constraints: Opaques = doc(
        "As of a pod; the default labelSelector selects the pods of this part."
    )
    runtime_class_name: Text = doc("RuntimeClass of the pods.")
    pod_labels: Texts = doc("Labels of the pods.")
    template: Opaque | None = doc(
        "A PodTemplateSpec that is merged over the template of the other values."
    )


class Rdma(Partial):
    """RDMA devices for the transfer of KV."""

    enabled: bool = doc("Whether instances get RDMA devices.")
    resource: Text = doc("The device plugin's extended resource.", pattern="^[^/]+/[^/]+$")
    count: int = doc("Units of the resource per instance.", ge=1, le=64)
    ipc_lock: bool = doc("Adds the capability IPC_LOCK and runs as root, to pin memory.")


class HugePages(Partial):
    """Huge pages, mounted at /dev/hugepages."""

    size: Literal["2Mi", "1Gi"] = doc("Size of a page.")
    amount: Quantity = doc("Memory in huge pages per instance.")


class PoolValues(PartValues):
    """The values that make the pod template of a pool."""

    rdma: Rdma
    hugepages: HugePages


class PrefillValues(PoolValues, Prefill):
    __doc__ = Prefill.__doc__


class DecodeValues(PoolValues, Decode):
    __doc__ = Decode.__doc__


class KvpValues(PoolValues, Kvp):
    __doc__ = Kvp.__doc__

    enabled: bool = doc("Whether the release has this pool.")


class ModelValues(service.ServedModel):
    """The served model."""

    name: service.ModelName = ""  # no ModelService
    uri: Annotated[
        service.ModelUri, Field(pattern="^(/.*|[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+)?$")
    ] = ""


class GatewayValues(PartValues, Gateway):
    """The REST gateway."""


class SchedulerValues(PartValues, service.Scheduler):
    """The scheduler."""


class Values(Partial):
    """Values of the chart millrace."""

    name_override: str = doc(
        "Name that replaces the release's name.",
        pattern="^([a-z]([-a-z0-9]{0,38}[a-z0-9])?)?$",
    )
    model: ModelValues
    weights: service.Weights = Field(json_schema_extra={"maxProperties": 1})
    slo_classes: service.SloClasses
    tenants: service.Tenants
    slo: service.Objectives
    scheduling: service.Scheduling
    settings: service.Settings
    paused: service.Paused
    gateway: GatewayValues
    scheduler: SchedulerValues
    prefill: PrefillValues
    decode: DecodeValues
    kvp: KvpValues
    image: platform.ImageValues
    images: platform.Images
    operator: platform.Operator
    service_account: platform.ServiceAccount
    redis: platform.Redis
    external_redis: platform.ExternalRedis
    ingress: platform.Ingress
    http_route: platform.HttpRoute
    tls: platform.TlsValues
    network_policy: platform.NetworkPolicy
    priority_class: platform.PriorityClass
    monitoring: platform.Monitoring
    global_: Opaque = doc("Values of a parent chart; not used.", alias="global")


#: The sections without which no template can be rendered, by the section around them. values.yaml
#: has them all, but Helm takes the defaults of a section away where a user's file has it without a
#: value (`prefill:` and nothing below it).
_SECTIONS = {
    "": (
        *("model", "weights", "prefill", "decode", "kvp", "gateway", "scheduler", "image"),
        *("images", "operator", "serviceAccount", "redis", "externalRedis", "ingress"),
        *("httpRoute", "tls", "networkPolicy", "priorityClass", "monitoring"),
    ),
    "gateway": ("keys",),
    "redis": ("persistence", "resources"),
    "tls": ("certManager", "selfSigned"),
    "networkPolicy": ("apiServer",),
    "monitoring": ("podMonitor", "alerts", "dashboards"),
}


def _closed(schema: Schema) -> Schema:
    """Returns JSON Schema that refuses fields which the API server would silently drop."""
    # JSON Schema does not know Kubernetes' keywords, and values.yaml has the defaults.
    kept = {k: v for k, v in schema.items() if k != "default" and not k.startswith("x-")}
    if "properties" in kept:
        kept["properties"] = {name: _closed(field) for name, field in kept["properties"].items()}
        kept.setdefault("additionalProperties", False)
    if "items" in kept:
        kept["items"] = _closed(kept["items"])
    return kept


def schema() -> dict[str, Any]:
    """Returns values.schema.json."""
    found = _closed(structural(Values))
    for name, sections in _SECTIONS.items():
        around = found["properties"][name] if name else found
        around["required"] = sorted({*around.get("required", ()), *sections})
    return {"$schema": "http://json-schema.org/draft-07/schema#", **found}


def as_file() -> str:
    """Returns the file's text."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_file(), encoding="utf-8")
