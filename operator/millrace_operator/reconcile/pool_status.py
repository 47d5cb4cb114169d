"""Builds the status of a pool, and the Events that report its changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace.core.autoscale.rules import Recommendation
from millrace_operator.manifests import objects
from millrace_operator.observed import ObservedPool, Pod, Pool
from millrace_operator.reconcile import conditions
from millrace_operator.reconcile.actions import Report
from millrace_operator.reconcile.conditions import Condition, seconds, timestamp
from millrace_operator.reconcile.drain import Leaving
from millrace_operator.reconcile.pool_metrics import seen
from millrace_operator.reconcile.rollout import Rollout

#: Signals change all the time; if only signals change, the status waits this many seconds.
SIGNALS_S = 30.0
_SIGNALS = ("metrics", "metricsTime", "recommendationReason")

#: Seconds in which a StatefulSet makes its pods.
UNMADE_S = 20.0

#: Seconds after a pod's grace period in which its node removes it.
REMOVAL_S = 60.0

ROLLING_OUT = "RollingOut"
_LIMITS = {"step": "Step", "minimum": "MinReplicas", "maximum": "MaxReplicas", "quota": "Quota"}
_WHY = {
    "ScaleIn": "the pool has one too many",
    "Rollout": "its template is old",
    "StageLeaves": "the pod of one of its stages leaves",
    "Retired": "the ModelService has no such pool any more",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A new spec.replicas."""

    replicas: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a pass over a pool."""

    wanted: int
    template: str
    revision: str
    leaving: tuple[Leaving, ...]
    returning: tuple[Mapping[str, Any], ...]  # entries of status.draining
    rollout: Rollout | None  # None: no change
    problem: Report | None = None  # from the spec
    paused: bool = False
    scaled: Scaled | None = None


def rolling_out(pool: Pool) -> bool:
    """Returns whether the last status shows a rollout."""
    last = conditions.by_type(pool.status).get("Progressing", {})
    return last.get("reason") == ROLLING_OUT


def status(pool: Pool, observed: ObservedPool, outcome: Outcome) -> dict[str, Any]:
    """Returns the whole status; equal to the last status as long as nothing has changed."""
    last = pool.status
    there = [pod for pod in observed.pods if not pod.terminating]
    serving = _serving(observed.pods, outcome)
    updated = [pod for pod in there if pod.template == outcome.template]
    generation = pool.metadata.get("generation", 0)
    advice = _advice(pool, observed)
    found: dict[str, Any] = {
        "observedGeneration": generation,
        "replicas": len(there),
        "readyReplicas": len(serving),
        "updatedReplicas": len(updated),
        "updatedReadyReplicas": sum(pod.ready for pod in updated),
        "drainingReplicas": len(outcome.leaving) + len(observed.pods) - len(there),
        "draining": [*(one.entry() for one in outcome.leaving), *outcome.returning],
        "selector": ",".join(f"{k}={v}" for k, v in objects.instance_selector(pool).items()),
        "revision": outcome.revision,
        "servingRevisions": sorted({pod.revision for pod in serving})[:16],
        "template": outcome.template,
        **{k: last[k] for k in ("lastScaleTime", "lastScaleReason") if k in last},
        "conditions": conditions.updated(
            last,
            _conditions(pool, observed, outcome, serving),
            generation=generation,
            now_s=observed.unix_s,
        ),
    }
    if advice is not None:
        found |= {"desiredReplicas": advice.replicas, "limitedBy": advice.limited_by}
    if outcome.scaled is not None:
        found["lastScaleTime"] = timestamp(observed.unix_s)
        found["lastScaleReason"] = outcome.scaled.reason[:512]
    # An empty list would never be equal: server-side apply drops empty lists.
    found = {k: v for k, v in found.items() if v != []}
    return found | _signals(pool, observed, found)


def _signals(pool: Pool, observed: ObservedPool, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the signals, as measured now or as in the last status."""
    last = pool.status
    before = {k: last[k] for k in _SIGNALS if k in last}
    now = dict(before)
    if observed.metrics is not None:
        now["metrics"] = seen(pool.spec, observed.metrics)
    if observed.recommendation is not None:
        now["recommendationReason"] = observed.recommendation.reason[:512]
    now = {k: v for k, v in now.items() if v != []}
    calm = all(last.get(k) == v for k, v in found.items())
    # A time of the future is of a clock that was set back: nobody waits for it.
    young = "metricsTime" in before and (
        0 <= int(observed.unix_s) - seconds(before["metricsTime"]) < SIGNALS_S
    )
    if now == before or (calm and young):
        return before
    return {**now, "metricsTime": timestamp(observed.unix_s)}


def _serving(pods: Sequence[Pod], outcome: Outcome) -> list[Pod]:
    """Returns the instances that take work."""
    out = {one.pod.name for one in outcome.leaving} | {e["pod"] for e in outcome.returning}
    return [p for p in pods if p.ready and not p.terminating and p.name not in out]


def _conditions(
    pool: Pool, observed: ObservedPool, outcome: Outcome, serving: Sequence[Pod]
) -> list[Condition]:
    metrics = _metrics_available(observed)
    return [
        _available(outcome, serving, observed),
        _progressing(pool, observed, outcome, len(serving)),
        metrics,
        _scaling_active(pool, outcome, metrics),
        _scaling_limited(_advice(pool, observed)),
        _draining(outcome.leaving),
        _degraded(observed, outcome),
    ]


def _available(outcome: Outcome, serving: Sequence[Pod], observed: ObservedPool) -> Condition:
    if not outcome.wanted:
        return Condition("Available", True, "ScaledToZero", "no instance is wanted")
    ready = f"{len(serving)} of {outcome.wanted} instances take work"
    if serving:
        return Condition("Available", True, "InstancesReady", ready)
    return Condition("Available", False, "NoInstanceReady", _trouble(observed) or ready)


def _unmade(pool: Pool, observed: ObservedPool, outcome: Outcome) -> str:
    """Returns where the reason stands if pods are missing for long: a quota, or a rule of
    admission, refuses them.
    """
    last, made = conditions.by_type(pool.status).get("Progressing", {}), len(observed.pods)
    since_s = observed.progressing_since_s if last.get("status") == "True" else math.inf
    if made >= outcome.wanted or observed.now_s - since_s < UNMADE_S:
        return ""
    shown = pool.name if pool.spec.stage_pods == "Shared" else f"{pool.name}-{made}"
    return (
        f"{made} of {outcome.wanted} pods are made: `kubectl describe statefulset {shown}` "
        "says what refuses the others"
    )


def _progressing(pool: Pool, observed: ObservedPool, outcome: Outcome, serving: int) -> Condition:
    if outcome.paused:
        return Condition("Progressing", False, "Paused", "the ModelService is paused")
    if outcome.problem is not None:
        return Condition("Progressing", False, outcome.problem.reason, outcome.problem.message)
    rollout = outcome.rollout
    kept = rollout.kept if rollout is not None else None
    stays = f"{kept.name} stays until others can stand in for it" if kept else ""
    if rollout is not None and rollout.active:
        done = f"{min(rollout.updated_ready(), outcome.wanted)} of {outcome.wanted} are replaced"
        message = "; ".join(filter(None, (done, rollout.waits_for(), stays)))
        return Condition("Progressing", True, ROLLING_OUT, message)
    if outcome.leaving or len(observed.pods) != outcome.wanted or serving != outcome.wanted:
        message = f"{serving} of {outcome.wanted} instances take work"
        leaving = ", ".join(sorted(one.pod.name for one in outcome.leaving))
        leaves = f"draining: {leaving}" if leaving else ""
        unmade = _unmade(pool, observed, outcome)
        message = "; ".join(filter(None, (message, leaves, unmade, stays)))
        return Condition("Progressing", True, "Scaling", message)
    return Condition("Progressing", False, "Settled", "every instance that is wanted takes work")


def _metrics_available(observed: ObservedPool) -> Condition:
    if observed.metrics is None or observed.metrics_error:
        message = observed.metrics_error or "no sample yet"
        return Condition("MetricsAvailable", False, "NoFreshSample", message)
    return Condition("MetricsAvailable", True, "Fresh", "the scheduler reports the pool's load")


def _scaling_active(pool: Pool, outcome: Outcome, metrics: Condition) -> Condition:
    mode = pool.spec.autoscaling.mode
    if mode != "Internal":
        who = "an HPA, KEDA or a person sets replicas" if mode == "External" else "it is off"
        return Condition("ScalingActive", False, f"Mode{mode}", who)
    if outcome.paused or outcome.problem is not None:
        reason = "Paused" if outcome.problem is None else outcome.problem.reason
        return Condition("ScalingActive", False, reason, "nothing is changed")
    if not metrics.status:
        return Condition("ScalingActive", False, "MetricsUnavailable", "the size is kept")
    return Condition("ScalingActive", True, "ModeInternal", "the operator sets replicas")


def _advice(pool: Pool, observed: ObservedPool) -> Recommendation | None:
    """Returns the recommendation; without the steps if no writer follows it, as they would change
    all the time.
    """
    advice, limits = observed.recommendation, pool.spec.autoscaling
    if advice is None or limits.mode == "Internal" or advice.limited_by != "step":
        return advice
    size = min(max(advice.wished, limits.min_replicas), limits.max_replicas)
    return replace(advice, replicas=size, limited=False, limited_by="")


def _scaling_limited(advice: Recommendation | None) -> Condition:
    if advice is None or not advice.limited:
        return Condition("ScalingLimited", False, "WithinLimits", "")
    reason = _LIMITS.get(advice.limited_by, "Limited")
    message = f"the signals ask for another size; {advice.limited_by} keeps {advice.replicas}"
    return Condition("ScalingLimited", True, reason, message)


def _draining(leaving: Sequence[Leaving]) -> Condition:
    if not leaving:
        return Condition("Draining", False, "NoneDrains", "")
    names = ", ".join(sorted(one.pod.name for one in leaving))
    return Condition("Draining", True, "InstancesDrain", names)


def _degraded(observed: ObservedPool, outcome: Outcome) -> Condition:
    if outcome.problem is not None:
        return Condition("Degraded", True, outcome.problem.reason, outcome.problem.message)
    if trouble := _trouble(observed):
        return Condition("Degraded", True, "InstanceTrouble", trouble)
    return Condition("Degraded", False, "Healthy", "")


def _trouble(observed: ObservedPool) -> str:
    troubles = {pod.name: "" if pod.terminating else pod.trouble for pod in observed.pods}
    troubles |= _stuck(observed)
    found = [f"{name}: {trouble}" for name, trouble in troubles.items() if trouble]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0] + more if found else ""


def _stuck(observed: ObservedPool) -> dict[str, str]:
    """Returns what to do about pods that their nodes do not remove: their successors wait."""
    return {
        one.name: f"should have ended by {timestamp(one.by_s)}, but node {one.node or '?'} does "
        "not confirm that it has. If that machine is off for good, let its successor start: "
        f"`kubectl delete pod {one.name} --force`"
        for pod in observed.pods
        for one in pod.endings
        if observed.now_s >= one.due_s + REMOVAL_S
    }


def reports(pool: Pool, observed: ObservedPool, outcome: Outcome) -> list[Report]:
    """Returns Events for changes since the last status."""
    found = _of_rollout(pool, outcome) + _of_drains(pool, outcome)
    if (scaled := outcome.scaled) is not None:
        sizes = f"from {pool.spec.replicas} to {scaled.replicas}"
        found.append(Report(reason="Scaled", message=f"{sizes}: {scaled.reason}"))
    last = conditions.by_type(pool.status)
    limited = _scaling_limited(_advice(pool, observed))
    if limited.reason == "Quota" and last.get("ScalingLimited", {}).get("reason") != "Quota":
        found.append(Report(reason="QuotaLimited", message=limited.message, warning=True))
    problem = outcome.problem
    if problem is not None and last.get("Degraded", {}).get("message") != problem.message:
        found.append(problem)
    return found


def _of_rollout(pool: Pool, outcome: Outcome) -> list[Report]:
    rollout = outcome.rollout
    if rollout is None or rollout.active == rolling_out(pool):
        return []
    if rollout.active:
        message = f"{outcome.wanted} instances get template {rollout.template}"
        return [Report(reason="RolloutStarted", message=message)]
    message = f"{outcome.wanted} instances have template {rollout.template}"
    return [Report(reason="RolloutFinished", message=message)]


def _of_drains(pool: Pool, outcome: Outcome) -> list[Report]:
    entries = pool.status.get("draining", [])
    known = {(e["pod"], e.get("uid")): e for e in entries if not e.get("returning")}
    found = []
    for one in outcome.leaving if outcome.rollout is not None else ():
        entry = known.get((one.pod.name, one.pod.uid))
        if entry is None:
            found.append(_report(one, "Draining", f"gets no new work: {_WHY[one.reason]}"))
        if one.timed_out and one.held and not (entry or {}).get("timedOut"):
            held = f"still holds {one.held} requests when its time to drain is over"
            found.append(_report(one, "DrainTimedOut", held, warning=True))
        if one.removed and not (entry or {}).get("removed"):
            held = f"still holds {one.held} requests" if one.held else "holds nothing"
            found.append(_report(one, "Drained", f"{held} and is removed"))
    return found


def _report(one: Leaving, reason: str, what: str, *, warning: bool = False) -> Report:
    return Report(reason=reason, message=f"{one.pod.name} {what}", warning=warning)
