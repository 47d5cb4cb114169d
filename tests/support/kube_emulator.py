"""An API server in memory, as far as the operator uses it: kmock's emulator, made stricter.

It adds to kmock: resourceVersion, uid, generation and creationTimestamp; server-side apply with
managers (fields that a manager no longer applies are removed), the status and scale subresources,
defaults of the CRDs' schemas, preconditions, label selectors, watches from a resourceVersion, the
garbage collector, and the controllers of StatefulSets and Deployments. The test injects `Fault`s,
and acts between two requests.
"""

from __future__ import annotations

import asyncio
import copy
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp.web
import kmock
from kmock import KubernetesEmulator, KubernetesError, Request, Server
from kubernetes.aio import client

from millrace_operator.run.kube import RESOURCES
from support.custom_resources import SCHEMAS, defaulted
from support.deadlines import HANG_S
from support.kube_api import condition
from support.kube_objects import (
    Object,
    bare,
    drop_unapplied,
    is_chosen,
    leaders_of,
    merge,
    pod_of,
    workers_of,
)


def conflict() -> KubernetesError:
    return KubernetesError(status=409, reason="Conflict", details={"causes": []})


def not_found() -> KubernetesError:
    return KubernetesError(status=404, reason="NotFound", details={"causes": []})


@dataclass
class Fault:
    """Makes the next `times` requests that `matches` accepts fail with `status`."""

    status: int
    times: int = 1
    matches: Callable[[Request], bool] = lambda request: request.method == "PATCH"
    headers: Mapping[str, str] = field(default_factory=dict)
    hits: int = 0


class KubeEmulator(KubernetesEmulator):
    """`objects` are reached by `find`. Pods of StatefulSets, and Deployments, which have no pods of
    their own, become ready as `ready_pods` says.
    """

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.faults: list[Fault] = []
        self.before: Callable[[Request], Awaitable[object]] | None = None  # every request
        self.ready_pods: Callable[[str], bool] = lambda name: True
        self.writes: list[tuple[str, str, str]] = []  # method, path, field manager
        self.lists: Counter[str] = Counter()  # by kind, watches not counted
        self._store: dict[tuple[str, str, str], Object] = {}  # by kind, namespace, name
        self._applied: dict[tuple[str, str], Object] = {}  # by uid, manager and subresource
        self._events: list[tuple[int, str, Object]] = []
        self._version = 100
        self._compacted = 0  # watches from an earlier version end
        self.expired = 0  # watches that have ended so
        self._news = asyncio.Condition()
        for kind in RESOURCES.keys() - {"LeaderWorkerSet"}:
            self.serve(kind)
        for name in ("v1/events", "v1/namespaces"):  # kopf looks for them
            self.resources[name].namespaced = name == "v1/events"

    # The tests' reads and actions.

    def serve(self, kind: str) -> None:
        """Serves objects of a kind; LeaderWorkerSets once a test asks for them."""
        resource = RESOURCES[kind]
        info = self.resources[kmock.resource(f"{resource.api_version}/{resource.plural}")]
        info.kind, info.namespaced = kind, resource.namespaced
        info.verbs = {"list", "watch", "get", "patch"}

    def find(self, kind: str, name: str, namespace: str = "default") -> Object | None:
        """Returns the object itself; change it by `edit`."""
        return self._store.get((kind, namespace, name))

    def names(self) -> list[tuple[str, str, str]]:
        """Returns kind, namespace and name of every object."""
        return sorted(self._store)

    def all(self, kind: str) -> list[Object]:
        return [obj for key, obj in sorted(self._store.items()) if key[0] == kind]

    async def make(self, manifest: Object) -> Object:
        """Creates as `kubectl create` does."""
        manifest = copy.deepcopy(manifest)
        manifest["metadata"].setdefault("namespace", "default")
        return await self._put(self._new(manifest))

    async def edit(self, kind: str, name: str, change: Callable[[Object], object]) -> Object:
        """Edits as `kubectl edit` does."""
        obj = copy.deepcopy(self._store[kind, "default", name])
        change(obj)
        return await self._put(obj)

    async def remove(self, kind: str, name: str) -> None:
        """Deletes as `kubectl delete` does."""
        await self._delete((kind, "default", name))

    def compact(self) -> None:
        """Forgets the changes so far, as etcd does every five minutes: a watch that has not seen
        them all ends with 410 at the next change, and its client has to list again.
        """
        self._compacted = self._version + 1

    async def until(self, true: Callable[[], object], within_s: float = HANG_S) -> None:
        """Waits until `true()`, checked whenever an object changes."""
        try:
            async with asyncio.timeout(within_s), self._news:
                await self._news.wait_for(lambda: bool(true()))
        except TimeoutError:
            raise AssertionError("it never came to be") from None

    async def news(self) -> None:
        """Makes `until` check again, for changes other than of objects."""
        async with self._news:
            self._news.notify_all()

    # The operator's view.

    async def _handle(self, request: Request) -> aiohttp.web.StreamResponse:
        if self.before is not None:
            await self.before(request)
        for fault in self.faults:
            if fault.times > 0 and fault.matches(request):
                fault.times -= 1
                fault.hits += 1
                await self.news()
                body = {"kind": "Status", "message": f"injected {fault.status}"}
                return aiohttp.web.json_response(
                    body, status=fault.status, headers=dict(fault.headers)
                )
        discovery = request.resource is None or request.resource.plural is None
        if request.action == kmock.action.LIST and not discovery:
            self.lists[self._kind(request)] += 1
            return aiohttp.web.json_response(self._listed(request))  # kmock's own way is slow
        if request.action == kmock.action.FETCH:
            return aiohttp.web.json_response(self._get(self._key(request)))
        if request.method == "GET" or discovery:
            return await super()._handle(request)
        manager = request.params.get("fieldManager", "")
        self.writes.append((str(request.method.value), request.url.path, manager))
        return aiohttp.web.json_response(await self._write(request))

    def _listed(self, request: Request) -> Object:
        if request.resource not in self.resources:
            raise not_found()
        chosen = [obj for obj in self.all(self._kind(request)) if is_chosen(request, obj)]
        begin = int(request.params.get("continue") or 0)
        end = begin + int(request.params.get("limit") or len(chosen))
        meta = {"resourceVersion": str(self._version)}
        if end < len(chosen):
            meta["continue"] = str(end)
        return {"metadata": meta, "items": chosen[begin:end]}

    async def _serve_watch(self, request: Request) -> AsyncIterator[Any]:
        yield b""
        kind, at = self._kind(request), int(request.params.get("resourceVersion") or 0)
        int(request.params.get("timeoutSeconds") or 0)  # the API server takes whole numbers
        while True:
            async with self._news:
                news = [event for event in self._events if event[0] > at]
                if not news:
                    await self._news.wait()
                    continue
            if at < self._compacted:
                self.expired += 1
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                yield {"type": "ERROR", "object": gone}
                return
            at = news[-1][0]
            for _, change, obj in news:
                if obj["kind"] == kind and is_chosen(request, obj):
                    yield {"type": change, "object": obj}

    async def _write(self, request: Request) -> Object:
        data: Object = copy.deepcopy(request.data or {})
        key = self._key(request)
        if request.method == "DELETE":
            uid = data.get("preconditions", {}).get("uid")
            if uid not in (None, self._get(key)["metadata"]["uid"]):
                raise conflict()
            return await self._delete(key)
        if request.method == "POST":
            if key in self._store:
                raise conflict()
            return await self._put(self._new(data))
        if request.method == "PUT":
            version = data["metadata"].get("resourceVersion")
            if version not in (None, self._get(key)["metadata"]["resourceVersion"]):
                raise conflict()
            return await self._put(data)
        return await self._patch(request, key, data)

    async def _patch(self, request: Request, key: tuple[str, str, str], data: Object) -> Object:
        old = self._store.get(key)
        apply = "apply-patch" in request.headers.get("Content-Type", "")
        if old is None:
            if not apply or request.subresource:
                raise not_found()
            if "uid" in data["metadata"]:
                raise conflict()
            new = self._new(data)
            manager = (new["metadata"]["uid"], request.params["fieldManager"])
            self._applied[manager] = data
            return await self._put(new)
        new = copy.deepcopy(old)
        if not apply:
            merge(new, data)
            return await self._put(new)
        uid = data["metadata"].get("uid", old["metadata"]["uid"])
        if uid != old["metadata"]["uid"]:
            raise conflict()
        manager = (uid, f"{request.params['fieldManager']}{request.subresource or ''}")
        part = ("status",) if request.subresource else tuple(k for k in data if k != "status")
        data = {name: value for name, value in data.items() if name in part}
        drop_unapplied(new, self._applied.get(manager, {}), data)
        self._applied[manager] = copy.deepcopy(data)
        merge(new, data)
        return await self._put(new)

    # The store.

    def _kind(self, request: Request) -> str:
        assert request.resource is not None
        return self.resources[request.resource].kind or ""

    def _key(self, request: Request) -> tuple[str, str, str]:
        name = request.name or (request.data or {}).get("metadata", {}).get("name", "")
        return self._kind(request), request.namespace or "", name

    def _get(self, key: tuple[str, str, str]) -> Object:
        if key not in self._store:
            raise not_found()
        return self._store[key]

    def _new(self, manifest: Object) -> Object:
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        manifest = copy.deepcopy(manifest)
        if "status" in manifest and manifest["kind"] != "Pod":
            del manifest["status"]
        manifest["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now}
        return manifest

    async def _put(self, new: Object) -> Object:
        """Stores the object if it has changed, and lets the controllers work."""
        meta = new["metadata"]
        key = (new["kind"], meta.get("namespace", ""), meta["name"])
        old = self._store.get(key)
        if new["kind"] in SCHEMAS:
            new = defaulted(SCHEMAS[new["kind"]], new)
        if old is not None and bare(old) == bare(new):
            return old
        new = copy.deepcopy(new)
        changed = old is None or old.get("spec") != new.get("spec")
        generation = old["metadata"].get("generation", 0) if old else 0
        new["metadata"]["generation"] = generation + changed
        self._store[key] = new
        await self._tell("MODIFIED" if old else "ADDED", new)
        if self._is_orphan(new):
            await self._delete(key)
            return new
        await self._control(new)
        return self._store[key]

    def _is_orphan(self, obj: Object) -> bool:
        """Returns whether the garbage collector finds none of the object's owners."""
        owners = {owner["uid"] for owner in obj["metadata"].get("ownerReferences", [])}
        return bool(owners) and owners.isdisjoint(
            o["metadata"]["uid"] for o in self._store.values()
        )

    async def _delete(self, key: tuple[str, str, str]) -> Object:
        obj = self._get(key)
        del self._store[key]
        await self._tell("DELETED", obj)
        uid = obj["metadata"]["uid"]
        for dependent, other in list(self._store.items()):
            owners = other["metadata"].get("ownerReferences", [])
            if any(owner["uid"] == uid for owner in owners) and dependent in self._store:
                await self._delete(dependent)
        for owner in obj["metadata"].get("ownerReferences", []):
            owner_key = (owner["kind"], key[1], owner["name"])
            if owner_key in self._store:
                await self._control(self._store[owner_key])
        return obj

    async def _tell(self, event: str, obj: Object) -> None:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        async with self._news:
            self._events.append((self._version, event, copy.deepcopy(obj)))
            self._news.notify_all()

    # Kubernetes' controllers.

    async def _control(self, obj: Object) -> None:
        if obj["kind"] == "StatefulSet":
            await self._stateful_set(obj)
        elif obj["kind"] == "Deployment":
            count = obj["spec"].get("replicas", 1)
            status = dict.fromkeys(("replicas", "updatedReplicas"), count)
            if self.ready_pods(obj["metadata"]["name"]):
                status |= {"readyReplicas": count, "availableReplicas": count}
            await self._put({**obj, "status": status})
        elif obj["kind"] == "LeaderWorkerSet":
            await self._put(leaders_of(obj))
        elif obj["kind"] == "Pod" and (workers := workers_of(obj, self._store)) is not None:
            await self._put(workers)

    async def _stateful_set(self, obj: Object) -> None:
        name, namespace = obj["metadata"]["name"], obj["metadata"]["namespace"]
        begin = obj["spec"].get("ordinals", {}).get("start", 0)
        wanted = {f"{name}-{begin + n}" for n in range(obj["spec"].get("replicas", 1))}
        owned = {
            pod["metadata"]["name"]: pod
            for pod in self.all("Pod")
            if pod["metadata"]["ownerReferences"][0]["uid"] == obj["metadata"]["uid"]
        }
        for pod_name in owned.keys() - wanted:
            await self._delete(("Pod", namespace, pod_name))
        for pod_name in wanted - owned.keys():
            await self.make(pod_of(pod_name, obj, ready=self.ready_pods(pod_name)))
        ready = [pod for pod in self.all("Pod") if pod["metadata"]["name"] in wanted]
        count = sum(condition(pod, "Ready") == "True" for pod in ready)
        if ("StatefulSet", namespace, name) in self._store:
            current = self._store["StatefulSet", namespace, name]
            status = {"replicas": len(wanted), "readyReplicas": count}
            await self._put({**current, "status": status})


@asynccontextmanager
async def kube_emulator() -> AsyncIterator[KubeEmulator]:
    async with KubeEmulator() as emulator, Server(emulator, hostnames=re.compile("nobody")):
        yield emulator


def configuration_of(emulator: KubeEmulator) -> client.Configuration:
    configuration = client.Configuration()
    configuration.host = str(emulator.url).rstrip("/")
    return configuration
