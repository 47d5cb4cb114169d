"""The OTLP/gRPC collector, and how a process names itself to it."""

from __future__ import annotations

from typing import Any, Final

from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_NAMESPACE,
    Resource,
)

SCOPE: Final = "millrace"
_TIMEOUT_S: Final = 3


def connection(endpoint: str) -> dict[str, Any]:
    """Returns the arguments of the SDK's exporters. `endpoint` is host:port or an http(s):// URL;
    only https:// is encrypted.
    """
    insecure = not endpoint.startswith("https://")
    return {"endpoint": endpoint, "insecure": insecure, "timeout": _TIMEOUT_S}


def resource(service: str, instance_id: str) -> Resource:
    """Returns what all spans, log records and metrics of a process have in common."""
    return Resource.create(
        {
            SERVICE_NAME: service,
            SERVICE_NAMESPACE: "millrace",
            SERVICE_INSTANCE_ID: instance_id,
        }
    )
