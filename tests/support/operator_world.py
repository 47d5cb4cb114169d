"""A namespace in which a real operator works, with the messages of its pods."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from support.control_plane import ControlPlane
from support.custom_objects import POOLS, VERSION, merged, service
from support.kube_api import MERGE, Object, condition, soon
from support.operator_process import OperatorProcess
from support.scheduler_peers import Net, Worker
from support.stand_in_nodes import StandInNodes, pod_template

#: The operator checks every second, and users set the size.
MANUAL: Mapping[str, Any] = {"autoscaling": {"mode": "Off", "intervalSeconds": 1}}

PARTS = ("gateway", "scheduler", "prefill", "decode", "kvp")
POOL_OF = {"PrefillGroup": "chat-prefill", "DecodePool": "chat-decode", "KVPWorkerPool": "chat-kvp"}
ROLE_OF = {"chat-prefill": "prefill", "chat-decode": "decode"}


class World:
    """The ModelService `chat` and all of its objects."""

    def __init__(
        self,
        plane: ControlPlane,
        namespace: str,
        nodes: StandInNodes,
        net: Net,
        operator: OperatorProcess,
    ) -> None:
        self.plane, self.api, self.namespace = plane, plane.api, namespace
        self.nodes, self.net, self.operator = nodes, net, operator
        self._applied: Object = {}

    def apply(self, **spec: Any) -> Object:
        """Applies the ModelService as a user does; fields add up over calls."""
        base = self._applied or service("chat", self.namespace, prefill=MANUAL, decode=MANUAL)
        wanted = merged(base, {"spec": spec})
        for part in PARTS:
            if part in wanted["spec"] or part in ("gateway", "scheduler"):
                given = wanted["spec"].setdefault(part, {})
                given["template"] = merged(pod_template(), given.get("template", {}))
        self._applied = wanted
        return self.api.apply(wanted)

    async def serve(self, **spec: Any) -> None:
        """Applies it and waits until it is available, with all its instances."""
        self.apply(**spec)
        await soon(lambda: condition(self.service(), "Available") == "True", what="Available")
        await self.settled()

    async def settled(self) -> None:
        """Waits until every pool has its size and its template."""

        def quiet() -> bool:
            found = self.service()
            seen = found["status"]["observedGeneration"] == found["metadata"]["generation"]
            return seen and condition(found, "Progressing") == "False"

        await soon(quiet, 90.0, what="settled")

    def service(self) -> Object:
        found = self.api.get(VERSION, "ModelService", self.namespace, "chat")
        assert found is not None
        return found

    def pool(self, kind: str) -> Object:
        found = self.api.get(VERSION, kind, self.namespace, POOL_OF[kind])
        assert found is not None
        return found

    def scale(self, kind: str, replicas: int) -> None:
        """Scales as `kubectl scale` does."""
        path = self.api.path(VERSION, kind, self.namespace, POOL_OF[kind], "scale")
        self.api.call("PATCH", path, {"spec": {"replicas": replicas}}, content_type=MERGE)

    def pods(self, kind: str) -> dict[str, Object]:
        """Returns the pods by name."""
        selector = f"millrace.dev/pool={POOL_OF[kind]}"
        found = self.api.list("v1", "Pod", self.namespace, selector)
        return {pod["metadata"]["name"]: pod for pod in found}

    def states(self) -> dict[str, Any]:
        """Returns statuses of the service and its pools, for a failed test."""
        kinds = ("ModelService", *POOLS)
        found = [obj for kind in kinds for obj in self.api.list(VERSION, kind, self.namespace)]
        return {f"{obj['kind']}/{obj['metadata']['name']}": obj.get("status") for obj in found}

    def drop_lease(self) -> None:
        """Removes the lease of a dead leader; without it the next leader need not wait."""
        meta = {"name": "llm-operator", "namespace": self.namespace}
        self.api.delete({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta})

    async def worker(self, pod: str, **card: object) -> Worker:
        """The stream from an instance to the scheduler."""
        return await self.net.worker(pod, role=ROLE_OF[pod.rpartition("-")[0]], **card)

    @asynccontextmanager
    async def engines(self) -> AsyncIterator[dict[str, Worker]]:
        """Opens a stream per ready pod of a pool during the block; yields them by the pod's name.

        Streams that a test has opened before stay the test's.
        """
        held: dict[str, tuple[str, Worker]] = {}
        workers: dict[str, Worker] = {}

        async def look() -> None:
            while True:
                pods = await asyncio.to_thread(self._ready_pods)
                for name in [n for n, (uid, _) in held.items() if pods.get(n) != uid]:
                    await held.pop(name)[1].cut()
                    del workers[name]
                for name in pods.keys() - held.keys():
                    workers[name] = await self.worker(name)
                    held[name] = pods[name], workers[name]
                await asyncio.sleep(0.05)

        looking = asyncio.create_task(look())
        try:
            yield workers
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking

    def _ready_pods(self) -> dict[str, str]:
        """Returns UIDs of the ready pods of prefill and decode, by name."""
        pods = self.pods("PrefillGroup") | self.pods("DecodePool")
        return {
            name: pod["metadata"]["uid"]
            for name, pod in pods.items()
            if condition(pod, "Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
        }


async def answer(request_id: str, prefill: Worker, decode: Worker) -> None:
    """Sends both instances' reports of a request, from its prompt to its last token."""
    await prefill.computed(request_id)
    await prefill.released(request_id)
    await decode.decoding(request_id)
    await decode.finished(request_id)
