"""The actions that `reconcile` returns; `cluster.py` carries them out in order. Plain data.

Every action is idempotent: an interrupted operator starts again from the observed state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.core.autoscale.drain import Cordon, Evict, Uncordon


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Applies a whole object on the server side, as manager `millrace-operator`, with force."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Deletes an object of the operator that is not wanted any more; it may be gone already.

    With `uid`, only the object with that UID.
    """

    kind: str
    name: str
    uid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetReplicas:
    """Sets spec.replicas of the pool itself through its scale subresource.

    It acts as manager `millrace-autoscaler`, as an HPA does.
    """

    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStatus:
    """Writes the whole status subresource of the reconciled object, if it differs."""

    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Posts a Kubernetes Event on the object."""

    reason: str  # CamelCase
    message: str
    warning: bool = False


Action = Apply | Delete | SetReplicas | Uncordon | Cordon | Evict | SetStatus | Report
