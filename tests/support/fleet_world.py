"""A small simulated cluster that carries out the operator's decisions.

It has one ModelService with a prefill and a decode pool. StatefulSets make and remove pods as
Kubernetes does (Parallel, OnDelete, highest ordinal first); pods start after random delays, crash,
hold requests; the scheduler knows the registered instances, and may fail to answer. `tick` lets
time pass and runs one pass of the operator over everything. Invariants are checked where they could
break.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from millrace.core.autoscale.drain import Cordon, Evict, Registration, Uncordon
from millrace.core.autoscale.rules import Autoscaler, PoolMetrics
from millrace_operator.manifests.naming import REVISION_LABEL, TEMPLATE_LABEL
from millrace_operator.observed import ObservedPool, ObservedService, Peer, Pod
from millrace_operator.reconcile.actions import (
    Action,
    Apply,
    Delete,
    Report,
    SetReplicas,
    SetStatus,
)
from millrace_operator.reconcile.conditions import by_type
from millrace_operator.reconcile.pool import reconcile_pool
from millrace_operator.reconcile.service import reconcile_service
from millrace_operator.run.sightings import Sightings
from millrace_operator.schema.pools import KINDS
from millrace_operator.spec import autoscale_config, parse_pool, parse_service
from support.custom_resources import DEFAULTS, SCHEMAS, defaulted, model_service

TICK_S = 5.0
DRAIN_S = 60
#: The least and the most instances of an autoscaled pool.
LIMITS = (1, 5)


@dataclass(eq=False)
class Node:
    """A pod, and the process in it."""

    pool: str
    ordinal: int
    uid: str
    template: str
    revision: str
    ready_at_s: float
    ready: bool = False
    unready_since_s: float = 0.0
    terminating_at_s: float | None = None
    cordoned: bool = False
    requests: list[float] = field(default_factory=list)  # when each will end

    @property
    def name(self) -> str:
        return f"{self.pool}-{self.ordinal}"

    @property
    def serves(self) -> bool:
        return self.ready and self.terminating_at_s is None and not self.cordoned

    def seen(self) -> Pod:
        return Pod(
            name=self.name,
            uid=self.uid,
            ordinal=self.ordinal,
            template=self.template,
            revision=self.revision,
            ready=self.ready and self.terminating_at_s is None,
            unready_since=str(self.unready_since_s),
            terminating=self.terminating_at_s is not None,
        )


def autoscaling(mode: str) -> dict[str, Any]:
    return {
        "mode": mode,
        "minReplicas": LIMITS[0],
        "maxReplicas": LIMITS[1],
        "scaleUp": {"stabilizationWindowSeconds": 0, "periodSeconds": 10},
        "scaleDown": {"stabilizationWindowSeconds": 30, "periodSeconds": 10},
    }


def _draining(pool: dict[str, Any]) -> dict[str, str]:
    """Returns why each pod leaves, by the status's draining entries."""
    entries = pool["status"].get("draining", ())
    return {e["pod"]: e["reason"] for e in entries if not e.get("returning")}


class FleetWorld:
    """A cluster. Time starts at 1000 s. The operator's wall clock steps by an hour all the time."""

    def __init__(
        self,
        random: Random,
        *,
        mode: str = "Internal",
        on_timeout: str = "Migrate",
        start_s: tuple[float, float] = (5.0, 40.0),
        sizes: tuple[int, int] = (2, 3),
        work_s: tuple[float, float] = (5.0, 200.0),
        surge: int = 1,
        **more: Any,
    ) -> None:
        """`more`: fields of both pools."""
        drain = {"timeoutSeconds": DRAIN_S, "onTimeout": on_timeout}
        section = {"autoscaling": autoscaling(mode), "drain": drain, "rollout": {"maxSurge": surge}}
        section |= more
        self.random = random
        self.on_timeout, self.start_s, self.work_s = on_timeout, start_s, work_s
        self.now_s = 1000.0
        self._steps = Random(7)
        self._sightings = Sightings(lambda: self.now_s)
        self._drains: dict[tuple[str, str, str], float] = {}  # when the status first had each
        self.service = model_service(
            prefill=copy.deepcopy(section) | {"replicas": sizes[0]},
            decode=copy.deepcopy(section) | {"replicas": sizes[1]},
        )
        self.live: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: list[Node] = []
        self.autoscalers: dict[str, Autoscaler] = {}
        self.load: dict[str, float] = {}  # the sum of the pool's signals, in instances
        self.silent_until_s = 0.0
        self.busy = True  # whether requests arrive
        self.events: Counter[str] = Counter()
        self.removed: list[str] = []
        self.has_leader_worker_sets = False
        self._uids = 0

    # ---- the operator

    def tick(self, *, stop_after: int | None = None) -> list[Action]:
        """Lets time pass; the operator carries out its decisions, or dies after `stop_after`
        actions.
        """
        self._pass_time()
        done: list[Action] = []
        for thing in [self.service, *self.pools()]:
            for action in self._decide(thing):
                if stop_after is not None and len(done) >= stop_after:
                    self.autoscalers.clear()
                    self._sightings = Sightings(lambda: self.now_s)
                    return done
                self._carry_out(thing, action)
                done.append(action)
        return done

    def pools(self) -> list[dict[str, Any]]:
        return [thing for (kind, _), thing in self.live.items() if kind in KINDS]

    def pool(self, role: str) -> dict[str, Any]:
        return next(p for p in self.pools() if KINDS[p["kind"]].role == role)

    def _decide(self, thing: dict[str, Any]) -> list[Action]:
        if thing["kind"] == "ModelService":
            observed = ObservedService(live=self.live, now_s=self._wall_s())
            return reconcile_service(parse_service(thing), observed, DEFAULTS)
        metrics = self._metrics(thing)
        pool = parse_pool(thing)
        name = pool.name
        if name not in self.autoscalers:
            self.autoscalers[name] = Autoscaler(autoscale_config(pool.spec))
        pods = [pod.seen() for pod in self._of(name)]
        seen = self._sightings.look(name, pool.status, pods)
        observed_pool = ObservedPool(
            service=self.service,
            live=self._children(name),
            pods=seen.pods,
            instances=self._instances(name),
            peers=tuple(Peer.of(other) for other in self.pools() if other is not thing),
            metrics=metrics,
            recommendation=self.autoscalers[name].step(metrics, self.now_s),
            has_leader_worker_sets=self.has_leader_worker_sets,
            draining_since_s=seen.draining_since_s,
            progressing_since_s=seen.progressing_since_s,
            now_s=seen.now_s,
            unix_s=self._wall_s(),
        )
        return reconcile_pool(pool, observed_pool, DEFAULTS)

    def _wall_s(self) -> float:
        return 1e6 + self.now_s + self._steps.choice((0.0, 3600.0, -3600.0))

    def _children(self, pool: str) -> dict[tuple[str, str], dict[str, Any]]:
        return {k: v for k, v in self.live.items() if k[1] == pool}

    def _metrics(self, pool: dict[str, Any]) -> PoolMetrics:
        name, wanted = pool["metadata"]["name"], pool["spec"]["replicas"]
        ready = min(sum(pod.serves for pod in self._of(name)), wanted)
        load = self.load.get(name, 2.0)
        silent = self.now_s < self.silent_until_s
        signal = (
            {"arriving": 0.8 * load}
            if pool["kind"] == "PrefillGroup"
            else {"kv_utilisation": min(0.8 * load / max(wanted, 1), 1.0)}
        )
        return PoolMetrics(
            sampled_s=self.now_s - (1000.0 if silent else 0.0),
            ready=ready,
            starting=wanted - ready,
            active_requests=1,
            **signal,
        )

    def _of(self, pool: str) -> list[Node]:
        return sorted((p for p in self.pods if p.pool == pool), key=lambda p: p.ordinal)

    def _instances(self, pool: str) -> dict[str, Registration] | None:
        if self.now_s < self.silent_until_s:
            return None
        return {
            pod.name: Registration(cordoned=pod.cordoned, held_requests=len(pod.requests))
            for pod in self._of(pool)
            if pod.ready
        }

    def _carry_out(self, thing: dict[str, Any], action: Action) -> None:
        match action:
            case Apply(manifest=manifest):
                self._apply(copy.deepcopy(dict(manifest)))
            case SetReplicas(replicas=replicas):
                self._check_limits(thing, replicas)
                thing["spec"]["replicas"] = replicas
                thing["metadata"]["generation"] += 1
            case SetStatus(status=status):
                self._set_status(thing, status)
            case Delete(kind="Pod", name=name, uid=uid):
                pod = next(p for p in self.pods if (p.name, p.uid) == (name, uid))
                self._check_removal(pod)
                self._check_capacity(pod)
                self._terminate(pod)
            case Delete(kind=kind, name=name):
                del self.live[kind, name]
            case Cordon(instance_id=name):
                self._cordon(thing, name)
            case Uncordon(instance_id=name):
                self._uncordon(name)
            case Evict(instance_id=name):
                pod = self._named(name)
                self._check_time(pod)
                pod.requests.clear()
            case Report(reason=reason):
                self.events[reason] += 1

    def _apply(self, manifest: dict[str, Any]) -> None:
        key = manifest["kind"], manifest["metadata"]["name"]
        before = self.live.get(key)
        if manifest["kind"] in SCHEMAS:
            assert "replicas" not in manifest["spec"], "the size is not the operator's to apply"
            if before is not None:
                manifest["spec"]["replicas"] = before["spec"]["replicas"]
            manifest = defaulted(SCHEMAS[manifest["kind"]], manifest)
        self._uids += 1
        kept = {"uid": f"u{self._uids}", "generation": 0} if before is None else before["metadata"]
        generation = kept["generation"] + 1
        manifest["metadata"] |= {"uid": kept["uid"], "generation": generation}
        if before is not None and "status" in before:
            manifest["status"] = before["status"]
        if manifest["kind"] == "Deployment":
            manifest["status"] = {"availableReplicas": manifest["spec"]["replicas"]}
        if before is None:
            self.live[key] = manifest
        else:
            before.clear()
            before.update(manifest)
        if manifest["kind"] == "StatefulSet":
            self._scale_in(self.live[key])

    def _cordon(self, pool: dict[str, Any], name: str) -> None:
        pod, reasons = self._named(name), _draining(pool)
        assert pod.terminating_at_s is None
        assert pod.name in reasons, "cordoned before the status says so"
        if reasons[pod.name] == "Rollout":
            self._check_capacity(pod)
        self._check_pairing(pool, pod)
        pod.cordoned = True

    def _uncordon(self, name: str) -> None:
        pod = self._named(name)
        assert pod.terminating_at_s is None
        pod.cordoned = False

    def _named(self, name: str) -> Node:
        return next(p for p in self.pods if p.name == name)

    # ---- invariants

    def _check_limits(self, pool: dict[str, Any], replicas: int) -> None:
        initial = "observedGeneration" not in pool.get("status", {})
        least, most = LIMITS
        assert initial or least <= replicas <= most, f"{replicas} replicas"

    def _check_removal(self, pod: Node) -> None:
        """An instance that holds requests stays until its time is over."""
        if pod.requests and pod.ready:
            assert self.on_timeout != "Wait", f"{pod.name} holds {len(pod.requests)} requests"
            self._check_time(pod)

    def _check_time(self, pod: Node) -> None:
        entries = self.pool_of(pod)["status"].get("draining", [])
        since = {e["pod"]: e["since"] for e in entries if e["uid"] == pod.uid}
        assert pod.name in since, f"{pod.name} has work, and never drained"
        drained_s = self.now_s - self._drains[pod.pool, pod.uid, since[pod.name]]
        assert drained_s >= DRAIN_S, f"{pod.name} has work, and drains for {drained_s} s only"

    def _set_status(self, thing: dict[str, Any], status: Mapping[str, Any]) -> None:
        assert status != thing.get("status")
        thing["status"] = copy.deepcopy(dict(status))
        if thing["kind"] in KINDS:
            self._sightings.wrote(thing["metadata"]["name"], status)
            self._note_drains(thing["metadata"]["name"], status)

    def _note_drains(self, pool: str, status: Mapping[str, Any]) -> None:
        there = {
            (pool, entry["uid"], entry["since"])
            for entry in status.get("draining", ())
            if not entry.get("returning")
        }
        kept = {key: at_s for key, at_s in self._drains.items() if key[0] != pool or key in there}
        self._drains = dict.fromkeys(there, self.now_s) | kept

    def pool_of(self, pod: Node) -> dict[str, Any]:
        return next(p for p in self.pools() if p["metadata"]["name"] == pod.pool)

    def _check_capacity(self, pod: Node) -> None:
        """A rollout takes no capacity: enough others serve when an instance is cordoned."""
        if not pod.ready:
            return
        pool = self.pool_of(pod)
        others = sum(other.serves for other in self._of(pod.pool) if other is not pod)
        least = pool["spec"]["replicas"] - (1 - pool["spec"]["rollout"]["maxSurge"])
        assert others >= least, f"{others} serve of {least} when {pod.name} goes"

    def _check_pairing(self, pool: dict[str, Any], pod: Node) -> None:
        """Some revision stays with all pools, by their statuses, if there was a common revision.

        An instance that is cordoned in the same pass does not count. A rollout without an extra
        instance may take a pool's only instance, unless a new instance is there already.
        """
        size, reasons = pool["spec"]["replicas"], _draining(pool)
        serving = [p for p in self._of(pod.pool) if p.serves]
        stay = {p.revision for p in serving if p.name not in reasons}
        others = [p for p in self.pools() if p is not pool and p["spec"]["replicas"]]
        known = [set(other["status"].get("servingRevisions", ())) for other in others]
        common = {p.revision for p in serving}.intersection(*known)
        rolled = size + pool["spec"]["rollout"]["maxSurge"] == 1 and "Rollout" in reasons.values()
        if rolled and not any(p.template == pool["status"]["template"] for p in serving):
            return
        assert not (size and common) or common & stay, f"{pod.name} breaks the last pair"

    # ---- the cluster

    def _pass_time(self) -> None:
        self.now_s += TICK_S
        for pod in list(self.pods):
            pod.requests = [end_s for end_s in pod.requests if end_s > self.now_s]
            if not pod.ready and pod.terminating_at_s is None and self.now_s >= pod.ready_at_s:
                pod.ready, pod.cordoned = True, False
            gone = pod.terminating_at_s is not None and (
                not pod.requests or self.now_s - pod.terminating_at_s > DRAIN_S
            )
            if gone:
                self.pods.remove(pod)
        for (kind, _), thing in self.live.items():
            if kind == "StatefulSet":
                self._scale_out(thing)
        self._arrive()

    def _arrive(self) -> None:
        for pod in self.pods:
            if self.busy and pod.serves and self.random.random() < 0.5:
                pod.requests.append(self.now_s + self.random.uniform(*self.work_s))

    def _scale_out(self, owner: dict[str, Any]) -> None:
        name, template = owner["metadata"]["name"], owner["spec"]["template"]
        there = {pod.ordinal for pod in self._of(name)}
        for ordinal in set(range(owner["spec"]["replicas"])) - there:
            self._uids += 1
            labels = template["metadata"]["labels"]
            delay_s = self.random.uniform(*self.start_s)
            self.pods.append(
                Node(
                    pool=name,
                    ordinal=ordinal,
                    uid=f"u{self._uids}",
                    template=labels[TEMPLATE_LABEL],
                    revision=labels[REVISION_LABEL],
                    ready_at_s=self.now_s + delay_s,
                    unready_since_s=self.now_s,
                )
            )

    def _scale_in(self, owner: dict[str, Any]) -> None:
        for pod in reversed(self._of(owner["metadata"]["name"])):
            if pod.ordinal >= owner["spec"]["replicas"] and pod.terminating_at_s is None:
                self._check_removal(pod)
                self._terminate(pod)

    def _terminate(self, pod: Node) -> None:
        pod.terminating_at_s = pod.terminating_at_s or self.now_s
        self.removed.append(pod.name)

    # ---- events of the cluster

    def crash(self, pool: str, index: int) -> None:
        """A process dies and starts again; its requests are lost."""
        pods = [p for p in self._of(pool) if p.ready]
        if pods:
            pod = pods[index % len(pods)]
            pod.ready, pod.requests = False, []
            pod.unready_since_s = self.now_s
            pod.ready_at_s = self.now_s + self.random.uniform(*self.start_s)

    def change(self, **model: Any) -> None:
        """A user edits spec.model."""
        self.service["spec"]["model"] |= model
        self.service["metadata"]["generation"] += 1

    def serving(self, role: str) -> list[Node]:
        """Returns the instances of a pool that take work."""
        name = self.pool(role)["metadata"]["name"]
        return [pod for pod in self._of(name) if pod.serves]

    def settle(self, ticks: int = 400, silent: int = 6) -> None:
        """Runs until every pod serves and the operator does nothing for `silent` passes in a row.

        Raises AssertionError if that never happens.
        """
        quiet = 0
        for _ in range(ticks):
            done = self.tick()
            quiet = 0 if done or not all(pod.serves for pod in self.pods) else quiet + 1
            if quiet == silent:
                return
        raise AssertionError(f"never calm; the last look did {done}")

    def happen(self, event: tuple[Any, ...]) -> None:
        """Lets an event of the weather happen, and one pass of the operator after it."""
        match event:
            case ("load", pool, load):
                self.load[pool] = load
            case ("crash", pool, index):
                self.crash(pool, index)
            case ("silence", long_s):
                self.silent_until_s = self.now_s + long_s
            case ("template", number):
                self.service["spec"]["settings"] = {"engine.max_batch": str(number)}
            case ("revision", number):
                self.change(revision=f"r{number}")
        self.tick(stop_after=event[1] if event[0] == "operator dies" else None)

    def progressing(self, role: str) -> str:
        return by_type(self.pool(role)["status"])["Progressing"]["reason"]
