"""Counts the instances of a pool that the namespace's ResourceQuotas have room for.

Kubernetes' documentation, "Resource Quotas": extended resources (GPUs, RDMA devices) are limited
under `requests.<resource>` only, the number of pods under `pods` and `count/pods`; a quota with
scopes counts only the pods that all its scopes match. CPU and memory are left to the API server: a
pool is sized by its devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

_POD_COUNTS = ("pods", "count/pods")


def room(
    quotas: Iterable[Mapping[str, Any]], template: Mapping[str, Any], existing: int, pods: int = 1
) -> int | None:
    """Returns how many instances of `pods` pods each all quotas allow, the pool's `existing`
    instances included.

    None when no quota limits them. Quotas are ResourceQuota objects, `template` is of any pod of an
    instance: all ask for the same devices.
    """
    spec = template.get("spec", {})
    needs = {f"requests.{name}": amount for name, amount in devices(spec).items()}
    needs |= dict.fromkeys(_POD_COUNTS, Decimal(1))
    needs = {name: amount * pods for name, amount in needs.items()}
    left = [
        (parse_quantity(hard[name]) - parse_quantity(used.get(name, 0))) // amount
        for quota in quotas
        if _counts(quota.get("spec", {}), spec)
        for hard, used in [_limits(quota)]
        for name, amount in needs.items()
        if name in hard
    ]
    return existing + max(int(min(left)), 0) if left else None


def devices(pod_spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """Returns a pod's extended resources: names with a domain other than kubernetes.io.

    Init containers run before the others: the larger need of the two counts.
    """
    needs: dict[str, Decimal] = {}
    for container in pod_spec.get("containers", []):
        for name, amount in _asked(container).items():
            needs[name] = needs.get(name, Decimal(0)) + amount
    for container in pod_spec.get("initContainers", []):
        for name, amount in _asked(container).items():
            needs[name] = max(needs.get(name, Decimal(0)), amount)
    return {name: amount for name, amount in needs.items() if amount > 0}


def _asked(container: Mapping[str, Any]) -> dict[str, Decimal]:
    resources = container.get("resources", {})
    # A device's request equals its limit; either may be left out.
    asked = {**resources.get("limits", {}), **resources.get("requests", {})}
    return {
        name: parse_quantity(amount)
        for name, amount in asked.items()
        if "/" in name and not name.split("/")[0].endswith("kubernetes.io")
    }


def _limits(quota: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns the enforced limits and their use. A quota without a count uses nothing."""
    status = quota.get("status", {})
    return status.get("hard") or quota.get("spec", {}).get("hard", {}), status.get("used", {})


def _counts(quota: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    """Returns whether the quota counts such pods: long-running, with requests, of a priority
    class.
    """
    named = [{"scopeName": name, "operator": "Exists"} for name in quota.get("scopes", [])]
    asked = quota.get("scopeSelector", {}).get("matchExpressions", [])
    return all(_in_scope(entry, pod) for entry in [*named, *asked])


def _in_scope(scope: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    match scope["scopeName"]:
        case "PriorityClass":
            return _selects(scope, pod.get("priorityClassName", ""))
        case "NotTerminating":
            return "activeDeadlineSeconds" not in pod
        case "Terminating":
            return "activeDeadlineSeconds" in pod
        case "NotBestEffort":
            return True  # a pod with a device has a request
        case _:  # BestEffort, and scopes that our pods never match
            return False


def _selects(scope: Mapping[str, Any], name: str) -> bool:
    values = scope.get("values", [])
    return {
        "In": name in values,
        "NotIn": name not in values,
        "Exists": bool(name),
        "DoesNotExist": not name,
    }.get(scope.get("operator", ""), False)
