"""`reconcile_pool`: decides the next actions that bring a pool to its wanted state.

The order of actions makes a pass safe to stop anywhere. A wanted instance is uncordoned before the
status forgets its drain. A leaving instance is written to the status, with the time, before the
scheduler hears of it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from millrace.core.autoscale.drain import Action as DrainAction
from millrace.core.autoscale.drain import Cordon, Evict, Remove, Uncordon
from millrace_operator.manifests import objects
from millrace_operator.manifests.naming import INITIAL
from millrace_operator.manifests.pods import Context
from millrace_operator.observed import ObservedPool, Pod, Pool, Service
from millrace_operator.reconcile.actions import (
    Action,
    Apply,
    Report,
    SetReplicas,
    SetStatus,
)
from millrace_operator.reconcile.drain import Leaving, Rules
from millrace_operator.reconcile.pod_makers import PodMakers, pod_makers
from millrace_operator.reconcile.pool_status import Outcome, Scaled, reports, rolling_out, status
from millrace_operator.reconcile.rollout import Rollout
from millrace_operator.schema.pools import KINDS
from millrace_operator.spec import Defaults, SpecError, autoscale_config, parse_service


def reconcile_pool(pool: Pool, observed: ObservedPool, defaults: Defaults) -> list[Action]:
    """Returns the actions for a PrefillGroup, DecodePool or KVPWorkerPool."""
    given = observed.service
    if "deletionTimestamp" in pool.metadata or (given and "deletionTimestamp" in given["metadata"]):
        return []  # its children are deleted with it, and pods drain at SIGTERM
    if given is None:
        name = pool.spec.service_ref.name
        problem = Report(
            reason="ServiceNotFound", message=f"there is no ModelService {name}", warning=True
        )
        return _only_status(pool, observed, problem=problem)
    try:
        service = parse_service(given)
        if service.spec.paused:
            return _only_status(pool, observed, paused=True)
        return _actions(pool, observed, service, defaults)
    except SpecError as error:
        problem = Report(reason="InvalidSpec", message=str(error), warning=True)
        return _only_status(pool, observed, problem=problem)


def _only_status(
    pool: Pool, observed: ObservedPool, *, problem: Report | None = None, paused: bool = False
) -> list[Action]:
    rules = Rules.of(pool, observed)
    leaving = rules.still(observed.pods)
    outcome = Outcome(
        wanted=pool.spec.replicas,
        template=pool.status.get("template", ""),
        revision=pool.status.get("revision", ""),
        leaving=tuple(leaving),
        returning=tuple(rules.returning(observed.pods, leaving)),
        rollout=None,
        problem=problem,
        paused=paused,
    )
    return _status_actions(pool, observed, outcome)


def _status_actions(pool: Pool, observed: ObservedPool, outcome: Outcome) -> list[Action]:
    """Returns Events, and the status if it has changed."""
    found: list[Action] = [*reports(pool, observed, outcome)]
    now = status(pool, observed, outcome)
    if now != pool.status:
        found.append(SetStatus(status=now))
    return found


def _actions(
    pool: Pool, observed: ObservedPool, service: Service, defaults: Defaults
) -> list[Action]:
    """Returns the actions for a correct pool of a service that is not paused. Raises SpecError."""
    autoscale_config(pool.spec)
    context = Context.of(service, defaults)
    makers = pod_makers(pool, context, observed)
    retired = _retired(pool, service)
    scaled = None if retired else _scaled(pool, observed)
    wanted = scaled.replicas if scaled else pool.spec.replicas
    rules = Rules.of(pool, observed)
    rollout = Rollout(
        template=makers.template,
        revision=context.revision,
        replicas=0 if retired else wanted,
        max_surge=pool.spec.rollout.max_surge,
        pods=observed.pods,
        peers=observed.peers,
        under_way=rolling_out(pool),
        doubted=rules.doubted(observed.pods),
        now_s=observed.now_s,
    )
    leaving = _leaving(observed.pods, rollout, rules, "Retired" if retired else "ScaleIn")
    drain = rules.actions(observed.pods, leaving)
    size, leaving = _removals(makers, rollout, leaving, drain)
    outcome = Outcome(
        wanted=rollout.replicas,
        template=rollout.template,
        revision=rollout.revision,
        leaving=tuple(leaving),
        returning=tuple(rules.returning(observed.pods, leaving)),
        rollout=rollout,
        scaled=scaled,
    )
    changed = objects.changed(observed.live, objects.of_pool(pool, makers.wanted(size)))
    return [
        *([SetReplicas(replicas=scaled.replicas)] if scaled else []),
        *(action for action in drain if isinstance(action, Uncordon)),
        *(Apply(manifest=manifest) for manifest in changed),
        *makers.deletions(size, leaving),
        *_status_actions(pool, observed, outcome),
        *(action for action in drain if isinstance(action, Cordon | Evict)),
    ]


def _removals(
    makers: PodMakers,
    rollout: Rollout,
    leaving: Sequence[Leaving],
    drain: Sequence[DrainAction],
) -> tuple[int, list[Leaving]]:
    """Returns the makers' size, and the leaving pods with those marked that are removed."""
    done = {action.instance_id for action in drain if isinstance(action, Remove)}
    kept = rollout.kept
    size = _size(
        makers.size,
        stays={one.pod.ordinal for one in leaving if one.pod.name not in done},
        wanted=max(rollout.size, kept.ordinal + 1 if kept else 0),
    )
    marked = [
        replace(
            one,
            removed=one.pod.name in done and (one.pod.ordinal >= size or one.is_replaced),
        )
        for one in leaving
    ]
    return size, marked


def _scaled(pool: Pool, observed: ObservedPool) -> Scaled | None:
    """Returns the pool's new size, if the operator sets it."""
    initial = pool.metadata.get("annotations", {}).get(INITIAL)
    advice = observed.recommendation
    if initial is not None and "observedGeneration" not in pool.status:
        new = Scaled(replicas=int(initial), reason="the initial size")
    elif advice is not None and pool.spec.autoscaling.mode == "Internal":
        new = Scaled(replicas=advice.replicas, reason=advice.reason)
    else:
        return None
    return new if new.replicas != pool.spec.replicas else None


def _retired(pool: Pool, service: Service) -> bool:
    """Returns whether a ModelService made the pool and does not want it any more."""
    owners = pool.metadata.get("ownerReferences", [])
    made = any(owner.get("uid") == service.metadata["uid"] for owner in owners)
    return made and KINDS[pool.kind].role not in service.spec.pools


def _leaving(existing: Sequence[Pod], rollout: Rollout, rules: Rules, reason: str) -> list[Leaving]:
    """Returns leaving pods: pods beyond the wanted size, for `reason`, except the kept pod; old
    pods; and pods that lose a stage.
    """
    surplus = [
        rules.leaving(pod, reason)
        for pod in existing
        if pod.ordinal >= rollout.size and not pod.terminating and pod != rollout.kept
    ]
    following = rollout.next(rules)
    old = rollout.broken() + ([] if following is None else [following])
    losing = [
        pod
        for pod in existing
        if pod.loses_stage and not pod.terminating and pod.ordinal < rollout.size
        if pod not in old
    ]
    replaced = [rules.leaving(pod, "Rollout") for pod in old]
    return surplus + replaced + [rules.leaving(pod, "StageLeaves") for pod in losing]


def _size(size: int, stays: Set[int], wanted: int) -> int:
    """Returns the next size. The highest ordinals leave first, so a pod that `stays` keeps all pods
    of lower ordinals.
    """
    while size > wanted and size - 1 not in stays:
        size -= 1
    return max(size, wanted)
