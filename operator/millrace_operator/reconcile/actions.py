"""What `reconcile` decides; `cluster.py` carries it out in the order given. Plain data.

Each can be done twice without harm: whoever is interrupted starts again from what it observes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Server-side apply of a whole object, as manager `millrace-operator`, with force."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Deletes an object of the operator's own that is not wanted any more; gone is fine.

    With `uid`, only that very object.
    """

    kind: str
    name: str
    uid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetReplicas:
    """Sets spec.replicas of the pool itself through its scale subresource.

    As manager `millrace-autoscaler`, the way an HPA does.
    """

    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """Tells the scheduler whether an instance gets new work."""

    instance_id: str
    cordoned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Ends what an instance still holds: elsewhere, or with an error when `abort`."""

    instance_id: str
    abort: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStatus:
    """The status subresource of the object that was reconciled, whole, when it differs."""

    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A Kubernetes Event on the object."""

    reason: str  # CamelCase
    message: str
    warning: bool = False


Action = Apply | Delete | SetReplicas | Cordon | Evict | SetStatus | Report
