"""What a cluster does with pods, where there is no kubelet: a stand-in for nodes.

Nothing runs. A pod is bound to a Node that exists by name only, said to be ready, and removed when
it is deleted. Everything else about it is the API server's and the controllers' own doing. Where
there is no controller manager either, the pods of StatefulSets are made here too, and Deployments
are said to have theirs; that is all that the operator looks at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import deepcopy
from datetime import UTC, datetime
from types import TracebackType

from support.kube_api import Api, Object, Refused, condition

NODE = "stand-in"

#: No scheduler of a real cluster takes pods of this name.
SCHEDULER = "stand-in"

LOOK_S = 0.1
HEARTBEAT_S = 10.0


def pod_template(**spec: object) -> Object:
    """What keeps pods from real nodes, for `template` of pools and services."""
    return {"spec": {"schedulerName": SCHEDULER, **spec}}


class StandInNodes:
    """Looks after the pods of one namespace while the block lasts, in a thread."""

    def __init__(self, api: Api, namespace: str, *, controllers: bool) -> None:
        """Without `controllers` it makes the pods of StatefulSets as well."""
        self.ready: Callable[[str], bool] = lambda pod: True  # told by the pod's name
        self.may_end: Callable[[str], bool] = lambda pod: True  # a deleted pod lingers until then
        self._api, self._namespace = api, namespace
        self._controllers = controllers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"nodes-{namespace}", daemon=True)
        self._beaten_s = -HEARTBEAT_S
        self._failure: Exception | None = None

    def __enter__(self) -> StandInNodes:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self._look()
            except Refused as refused:  # the object is gone, or has changed: look again
                if refused.status not in (404, 409):
                    self._failure = refused
                    return

    def _look(self) -> None:
        if time.monotonic() - self._beaten_s > HEARTBEAT_S:
            _heartbeat(self._api)
            self._beaten_s = time.monotonic()
        for pod in self._api.list("v1", "Pod", self._namespace):
            self._look_after(pod)
        if not self._controllers:
            for each in self._api.list("apps/v1", "StatefulSet", self._namespace):
                self._staff(each)
            for each in self._api.list("apps/v1", "Deployment", self._namespace):
                self._deploy(each)

    def _look_after(self, pod: Object) -> None:
        name, spec = pod["metadata"]["name"], pod["spec"]
        if pod["metadata"].get("deletionTimestamp"):
            if self.may_end(name):
                self._api.delete(pod, grace_s=0)
        elif not spec.get("nodeName"):
            if spec["schedulerName"] == SCHEDULER:
                self._bind(pod)
        elif spec["nodeName"] == NODE:
            ready = self.ready(name)
            if ready != (condition(pod, "Ready") == "True"):
                self._api.merge(pod, {"status": _running(pod, ready)}, "status", manager=NODE)

    def _bind(self, pod: Object) -> None:
        meta = pod["metadata"]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
        }
        path = self._api.path("v1", "Pod", meta["namespace"], meta["name"], "binding")
        self._api.call("POST", path, binding)

    def _staff(self, stateful_set: Object) -> None:
        """One look of the StatefulSet controller at a set with Parallel and OnDelete."""
        meta, spec = stateful_set["metadata"], stateful_set["spec"]
        labels = spec["selector"]["matchLabels"]
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        pods = {
            pod["metadata"]["name"]: pod
            for pod in self._api.list("v1", "Pod", self._namespace, selector)
        }
        first = spec.get("ordinals", {}).get("start", 0)
        wanted = [f"{meta['name']}-{first + number}" for number in range(spec["replicas"])]
        for ordinal, name in enumerate(wanted, start=first):
            if name not in pods:
                self._make(stateful_set, name, ordinal)
        for name in pods.keys() - set(wanted):
            if not pods[name]["metadata"].get("deletionTimestamp"):
                self._api.delete(pods[name])
        ready = sum(condition(pod, "Ready") == "True" for pod in pods.values())
        self._say(
            stateful_set,
            {"replicas": len(pods), "readyReplicas": ready, "availableReplicas": ready},
        )

    def _make(self, stateful_set: Object, name: str, ordinal: int) -> None:
        template = deepcopy(stateful_set["spec"]["template"])
        meta = template["metadata"]
        meta.update(name=name, namespace=self._namespace)
        meta["labels"] |= {
            "apps.kubernetes.io/pod-index": str(ordinal),
            "statefulset.kubernetes.io/pod-name": name,
        }
        meta["ownerReferences"] = [_controller(stateful_set)]
        template["spec"] |= {
            "hostname": name,
            "subdomain": stateful_set["spec"].get("serviceName", ""),
        }
        path = self._api.path("v1", "Pod", self._namespace)
        self._api.call("POST", path, {"apiVersion": "v1", "kind": "Pod", **template})

    def _deploy(self, deployment: Object) -> None:
        replicas = deployment["spec"]["replicas"]
        counts = ("replicas", "readyReplicas", "availableReplicas", "updatedReplicas")
        self._say(deployment, dict.fromkeys(counts, replicas))

    def _say(self, obj: Object, counts: dict[str, int]) -> None:
        status = {**counts, "observedGeneration": obj["metadata"]["generation"]}
        if any(obj.get("status", {}).get(name, 0) != value for name, value in status.items()):
            self._api.merge(obj, {"status": status}, "status", manager=NODE)


def _controller(owner: Object) -> Object:
    meta = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _running(pod: Object, ready: bool) -> Object:
    """The status that a kubelet gives a pod whose containers run."""
    now, containers = _now(), pod["spec"]["containers"]
    address = (
        f"10.1.{hash(pod['metadata']['uid']) % 65536 // 256}.{hash(pod['metadata']['uid']) % 256}"
    )
    says = {"status": str(ready), "lastTransitionTime": now}
    return {
        "phase": "Running",
        "startTime": now,
        "hostIP": "127.0.0.1",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": now},
            {"type": "Initialized", "status": "True", "lastTransitionTime": now},
            {"type": "ContainersReady", **says},
            {"type": "Ready", **says},
        ],
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": container["image"],
                "ready": ready,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": now}},
            }
            for container in containers
        ],
    }


def remove_node(api: Api) -> None:
    api.delete({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})


def _heartbeat(api: Api) -> None:
    """Keeps the controller manager from taking the Node for dead."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
    api.apply(node, manager=NODE, force=True)
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "StandIn",
        "message": "nothing runs here",
        "lastHeartbeatTime": _now(),
        "lastTransitionTime": _now(),
    }
    api.merge(node, {"status": {"conditions": [ready]}}, "status", manager=NODE)
    micro = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": NODE, "namespace": "kube-node-lease"},
        "spec": {"holderIdentity": NODE, "leaseDurationSeconds": 40, "renewTime": micro},
    }
    api.apply(lease, manager=NODE, force=True)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
