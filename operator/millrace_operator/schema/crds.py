"""The CustomResourceDefinitions, group millrace.dev/v1alpha1: the models with names and columns."""

from __future__ import annotations

from typing import Any

from millrace_operator.schema import API_VERSION, GROUP, VERSION
from millrace_operator.schema.pools import KINDS, ModelInstances
from millrace_operator.schema.record import DNS_LABEL, Record, Schema, rule, structural
from millrace_operator.schema.service import ModelServiceSpec
from millrace_operator.schema.status import PoolStatus, ServiceStatus

#: The longest names. A StatefulSet's pod carries the set's name and a hash of ten characters in a
#: label, which has at most 63 characters; a ModelService adds `-prefill`.
LONGEST_POOL_NAME = 52
LONGEST_SERVICE_NAME = LONGEST_POOL_NAME - len("-prefill")
#: StatefulSets of later stages are named after the pool, the instance's number and a pod's.
SHORTER_WITH_STAGE_PODS = len("-1000-0")


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


def _root(
    text: str,
    spec: type[Record],
    state: type[Record],
    longest_name: int,
    with_stages: tuple[str, ...] = (),
) -> Schema:
    """`with_stages`: paths of the sections that may give stages pods of their own."""
    name = rule(
        f"self.metadata.name.size() <= {longest_name} && self.metadata.name.matches('{DNS_LABEL}')",
        f"the name is a DNS label of at most {longest_name} characters that starts with a letter",
    )
    return {
        "type": "object",
        "description": text,
        "properties": {
            "apiVersion": {"type": "string", "description": f"{API_VERSION}."},
            "kind": {"type": "string", "description": "The kind of this object."},
            "metadata": {"type": "object"},  # the API server describes it
            "spec": structural(spec),
            "status": structural(state),
        },
        "required": ["spec"],
        "x-kubernetes-validations": [name, *(_shorter(path, longest_name) for path in with_stages)],
    }


def _shorter(path: str, longest_name: int) -> Schema:
    most = longest_name - SHORTER_WITH_STAGE_PODS
    return rule(
        f"!has({path}) || {path}.stagePods == 'Shared' || self.metadata.name.size() <= {most}",
        f"the name has at most {most} characters where {path.removeprefix('self.')}.stagePods is "
        "Own",
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


def _names(kind: str, short: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": f"{kind.lower()}s",
        "singular": kind.lower(),
        "shortNames": [short],
        "categories": ["millrace"],
    }


def definitions() -> list[dict[str, Any]]:
    """Returns the CustomResourceDefinitions in the API server's form."""
    service = _root(
        "A served model: its gateway, its scheduler and its pools.",
        ModelServiceSpec,
        ServiceStatus,
        LONGEST_SERVICE_NAME,
        ("self.spec.prefill", "self.spec.decode"),
    )
    names = _names("ModelService", "ms")
    found = [_definition(names, service, SERVICE_COLUMNS, scales=False)]
    for kind in KINDS.values():
        text = structural(kind.section)["description"]
        paths = ("self.spec",) if issubclass(kind.spec, ModelInstances) else ()
        pool = _root(text, kind.spec, PoolStatus, LONGEST_POOL_NAME, paths)
        names = _names(kind.kind, kind.short)
        found.append(_definition(names, pool, POOL_COLUMNS, scales=True))
    return found
