"""The inputs of `reconcile`: the state that the operator observed, read by `cluster.py`.

The wanted state is parsed. Other objects are dicts as the API server gives them, with defaults
filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from millrace.core.autoscale.drain import Registration
from millrace.core.autoscale.rules import PoolMetrics, Recommendation
from millrace_operator.schema.pools import PoolSpec
from millrace_operator.schema.record import Record
from millrace_operator.schema.service import ModelServiceSpec

#: An object of the API: apiVersion, kind, metadata, spec, status.
Object = Mapping[str, Any]
SpecT = TypeVar("SpecT", bound=Record, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource(Generic[SpecT]):
    """A custom object with its parsed spec."""

    kind: str
    metadata: Mapping[str, Any]
    spec: SpecT
    given: Mapping[str, Any]  # the spec as the API server gives it
    status: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The object's name."""
        return str(self.metadata["name"])


Service = Resource[ModelServiceSpec]
Pool = Resource[PoolSpec]


def service_of(pool: Object) -> str:
    """Returns the name of the ModelService of an unparsed pool; "" if it names none: the CRD that
    accepted it may have had another schema.
    """
    reference = (pool.get("spec") or {}).get("serviceRef")
    return str(reference.get("name", "")) if isinstance(reference, Mapping) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A pod that is terminating."""

    name: str
    node: str
    by_s: float  # unix seconds when its grace period ends, as the API server says
    grace_s: float = 0.0  # its grace period
    due_s: float = math.inf  # when its grace period ends, by the clock of `ObservedPool.now_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """An instance's pod, or that of its first stage. Its name is the instance's id."""

    name: str
    uid: str
    ordinal: int
    template: str  # the label millrace.dev/template: the template that it was made from
    revision: str = ""  # the label millrace.dev/revision: the model's revision that it serves
    ready: bool = False
    unready_since: str = ""  # since when it is not ready, as the API says; no clock here is like it
    unready_since_s: float = math.inf  # the same by the clock of `ObservedPool.now_s`; inf: unknown
    terminating: bool = False
    endings: tuple[Ending, ...] = ()  # of its terminating pods, those of later stages included
    trouble: str = ""  # why it does not start: "Unschedulable: ...", "CrashLoopBackOff: ..."
    loses_stage: bool = False  # the pod of a later stage of the instance is terminating


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The status of another pool of the service: rollouts of two pools proceed together."""

    name: str
    revision: str  # the model's revision that it will serve
    replicas: int  # spec.replicas
    updated_ready: int  # ready pods of its current template
    serving: frozenset[str] = frozenset()  # revisions of its serving instances

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
    """The observed state of a PrefillGroup, DecodePool or KVPWorkerPool."""

    service: Object | None  # the ModelService in serviceRef; it may be wrong
    live: Mapping[tuple[str, str], Object] = field(default_factory=dict)  # (kind, name): children
    pods: tuple[Pod, ...] = ()
    instances: Mapping[str, Registration] | None = (
        None  # by id; None: the scheduler does not answer
    )
    peers: tuple[Peer, ...] = ()
    metrics: PoolMetrics | None = None  # the last sample, of any age
    recommendation: Recommendation | None = None
    metrics_error: str = ""  # why there is no fresh sample
    has_leader_worker_sets: bool = False  # whether the API server serves them
    #: Since when this operator has seen what the status says, by the clock of `now_s`: drains by
    #: (pod, UID), and the condition Progressing.
    draining_since_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    progressing_since_s: float = math.inf
    now_s: float  # by a clock that steps of the wall clock do not change: it measures durations
    unix_s: float  # by the wall clock: the status shows it


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedService:
    """The observed state of a ModelService."""

    live: Mapping[tuple[str, str], Object] = field(default_factory=dict)  # (kind, name): children
    listed: Mapping[str, Object] = field(default_factory=dict)  # ModelServices of its gateway
    #: Why pods of the scheduler and of the gateway do not start, by component.
    troubles: Mapping[str, str] = field(default_factory=dict)
    now_s: float  # unix seconds
