"""The custom resources of Millrace, group millrace.dev/v1alpha1.

`python -m millrace_operator.schema` writes them to charts/millrace/crds. Code makes them because a
pool's fields appear in its own kind and again in ModelService.
"""

from __future__ import annotations

from typing import Any

from millrace_operator.schema import pools, service, status
from millrace_operator.schema.fields import DNS_LABEL, Schema, record, rule

GROUP = "millrace.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

#: The longest names. A StatefulSet's pod carries the set's name and a hash of ten characters in a
#: label, which has at most 63 characters; a ModelService adds `-prefill`.
LONGEST_POOL_NAME = 52
LONGEST_SERVICE_NAME = LONGEST_POOL_NAME - len("-prefill")


def _column(name: str, path: str, kind: str = "string", priority: int = 0) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    return column | ({"priority": priority} if priority else {})


def _condition(kind: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].status'


SERVICE_COLUMNS = [
    _column("Model", ".spec.model.name"),
    _column("Prefill", ".status.prefillReady"),
    _column("Decode", ".status.decodeReady"),
    _column("KVP", ".status.kvpReady"),
    _column("Phase", ".status.phase"),
    _column("Available", _condition("Available")),
    _column("Endpoint", ".status.endpoint", priority=1),
    _column("Age", ".metadata.creationTimestamp", "date"),
]
POOL_COLUMNS = [
    _column("Service", ".spec.serviceRef.name"),
    _column("Replicas", ".spec.replicas", "integer"),
    _column("Ready", ".status.readyReplicas", "integer"),
    _column("Desired", ".status.desiredReplicas", "integer"),
    _column("Updated", ".status.updatedReplicas", "integer"),
    _column("Draining", ".status.drainingReplicas", "integer"),
    _column("Mode", ".spec.autoscaling.mode"),
    _column("Available", _condition("Available")),
    _column("Reason", ".status.recommendationReason", priority=1),
    _column("Age", ".metadata.creationTimestamp", "date"),
]


def _root(doc: str, spec: Schema, state: Schema, longest_name: int) -> Schema:
    text = {"type": "string"}
    properties: dict[str, Schema] = {
        "apiVersion": {**text, "description": f"{API_VERSION}."},
        "kind": {**text, "description": "The kind of this object."},
        "metadata": {"type": "object"},  # the API server describes it
        "spec": spec,
        "status": state,
    }
    return record(
        doc,
        properties,
        required=("spec",),
        rules=(
            rule(
                f"self.metadata.name.size() <= {longest_name} && "
                f"self.metadata.name.matches('{DNS_LABEL}')",
                f"the name is a DNS label of at most {longest_name} characters that starts "
                "with a letter",
            ),
        ),
    )


def _definition(
    names: dict[str, Any], schema: Schema, columns: list[dict[str, Any]], *, scales: bool
) -> dict[str, Any]:
    subresources: dict[str, Any] = {"status": {}}
    if scales:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": subresources,
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names['plural']}.{GROUP}",
            "labels": {"app.kubernetes.io/part-of": "millrace"},
        },
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def _names(kind: str, plural: str, short: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": plural,
        "singular": kind.lower(),
        "shortNames": [short],
        "categories": ["millrace"],
    }


def definitions() -> list[dict[str, Any]]:
    """Returns the CustomResourceDefinitions in the API server's form."""
    service_root = _root(
        "A served model: its gateway, its scheduler and its pools.",
        service.service_spec(),
        status.service_status(),
        LONGEST_SERVICE_NAME,
    )
    found = [
        _definition(
            _names("ModelService", "modelservices", "ms"),
            service_root,
            SERVICE_COLUMNS,
            scales=False,
        )
    ]
    for kind in pools.KINDS:
        root = _root(kind.doc, pools.pool_spec(kind), status.pool_status(), LONGEST_POOL_NAME)
        names = _names(kind.kind, kind.plural, kind.short)
        found.append(_definition(names, root, POOL_COLUMNS, scales=True))
    return found
