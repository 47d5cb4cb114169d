"""What the operator found: the inputs of `reconcile`. Plain data, read by `cluster.py`.

Objects of the API are dicts as the API server gives them, defaults filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.core.autoscale.rules import PoolMetrics, Recommendation

#: An object of the API: apiVersion, kind, metadata, spec, status.
Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """An instance's pod. Its name is the instance's id."""

    name: str
    uid: str
    ordinal: int
    template: str  # the label millrace.dev/template: which template it was made from
    revision: str = ""  # the label millrace.dev/revision: of the model that it serves
    ready: bool = False
    unready_since_s: float = math.inf  # unix seconds, of one that is not ready; inf: not known
    terminating: bool = False
    trouble: str = ""  # why it does not start: "Unschedulable: ...", "CrashLoopBackOff: ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What the scheduler says of an instance."""

    cordoned: bool
    held_requests: int  # in compute, in the batch, or with a lease on its pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another pool of the service, as its status says: rollouts go on in pairs."""

    name: str
    revision: str  # of the model that it is to serve
    replicas: int  # spec.replicas
    updated_ready: int  # ready pods of the template that it is to have
    serving: frozenset[str] = frozenset()  # revisions of the instances that take work

    @classmethod
    def of(cls, pool: Object) -> Peer:
        status = pool.get("status", {})
        return cls(
            name=pool["metadata"]["name"],
            revision=status.get("revision", ""),
            replicas=pool["spec"].get("replicas", 1),
            updated_ready=status.get("updatedReadyReplicas", 0),
            serving=frozenset(status.get("servingRevisions", ())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPool:
    """Around one PrefillGroup, DecodePool or KVPWorkerPool."""

    service: Object | None  # the ModelService that serviceRef names
    live: Mapping[tuple[str, str], Object] = field(default_factory=dict)  # (kind, name): children
    pods: tuple[Pod, ...] = ()
    instances: Mapping[str, Instance] | None = None  # by id; None: the scheduler does not answer
    peers: tuple[Peer, ...] = ()
    metrics: PoolMetrics | None = None  # the last sample, however old
    recommendation: Recommendation | None = None
    metrics_error: str = ""  # why there is no fresh sample
    now_s: float  # unix seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedService:
    """Around one ModelService."""

    live: Mapping[tuple[str, str], Object] = field(default_factory=dict)  # (kind, name): children
    now_s: float  # unix seconds
