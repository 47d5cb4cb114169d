"""Watches objects with kopf and touches the affected objects in the work queue. Writes nothing.

Only `kopf.on.event` is used: kopf's other handlers keep their state in annotations and finalizers,
and an object with a finalizer can't be deleted while the operator is down.

kopf runs in a thread and an event loop of its own: it ends all tasks in its loop when it stops, and
it takes the process's signals when it is in the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any

import kopf
from kubernetes.aio import client

from millrace.core.errors import MillraceError
from millrace_operator.manifests.naming import COMPONENT_LABEL, POOL_LABEL, SERVICE_LABEL
from millrace_operator.observed import service_of
from millrace_operator.run.kube import RESOURCES
from millrace_operator.run.queue import Key
from millrace_operator.schema.pools import KINDS

_POOLS = {kind.role: kind.kind for kind in KINDS.values()}  # by component label
_CHILDREN = ("StatefulSet", "Deployment", "Pod")

#: Timeouts in seconds. Watches end at the server after a while, so a dead connection hides changes
#: for at most that long; an answer takes as long as the largest list.
WATCH_S = 300  # the API server takes whole seconds
REQUEST_S = 30.0
CONNECT_S = 10.0
STOP_S = 3.0


class Touches:
    """Turns events into touches of the queue."""

    def __init__(self, touch: Callable[[Key], object]) -> None:
        self._touch = touch
        self._seen: dict[Key, tuple[object, object]] = {}  # for itself, for others
        self._pools: dict[tuple[str, str], set[Key]] = {}  # by (namespace, service)
        self._listed: dict[Key, frozenset[str]] = {}  # services behind each service's gateway

    def service(self, event: str | None, body: Mapping[str, Any]) -> None:
        """Touches a ModelService, its pools, and the gateways that list it: all are built from its
        spec, too.
        """
        key = _key("ModelService", body)
        if not self._changed(key, event, body)[0]:
            return
        self._touch(key)
        for pool in self._pools.get((key.namespace, key.name), ()):
            self._touch(pool)
        for gateway, names in self._listed.items():
            if gateway.namespace == key.namespace and key.name in names:
                self._touch(gateway)
        models = ((body.get("spec") or {}).get("gateway") or {}).get("models") or ()
        self._listed[key] = frozenset(one["service"] for one in models)
        if event == "DELETED" or not models:
            del self._listed[key]

    def pool(self, kind: str, event: str | None, body: Mapping[str, Any]) -> None:
        """Touches a pool, its service, which shows its state, and its siblings, whose rollouts wait
        for it.
        """
        key = _key(kind, body)
        spec_changed, state_changed = self._changed(key, event, body)
        name = service_of(body)
        siblings = self._pools.setdefault((key.namespace, name), set())
        siblings.add(key)
        if spec_changed:
            self._touch(key)
        if name and (spec_changed or state_changed):
            self._touch(Key("ModelService", key.namespace, name))
            for sibling in siblings - {key}:
                self._touch(sibling)
        if event == "DELETED":
            siblings.discard(key)
            if not siblings:
                del self._pools[key.namespace, name]

    def child(self, body: Mapping[str, Any]) -> None:
        """Touches the owner of a StatefulSet, a Deployment or a pod, by its labels."""
        meta = body.get("metadata", {})
        labels, namespace = meta.get("labels", {}), meta.get("namespace", "")
        kind = _POOLS.get(labels.get(COMPONENT_LABEL, ""))
        if POOL_LABEL in labels and kind:
            self._touch(Key(kind, namespace, labels[POOL_LABEL]))
        elif SERVICE_LABEL in labels:
            self._touch(Key("ModelService", namespace, labels[SERVICE_LABEL]))

    def _changed(self, key: Key, event: str | None, body: Mapping[str, Any]) -> tuple[bool, bool]:
        """Returns whether the spec, and the state that other objects read, have changed."""
        if event == "DELETED":
            self._seen.pop(key, None)
            return True, True
        now = _asked(body), _state(body)
        before = self._seen.get(key, (None, None))
        self._seen[key] = now
        return now[0] != before[0], now[1] != before[1]


def _asked(body: Mapping[str, Any]) -> object:
    meta = body.get("metadata", {})
    return meta.get("uid"), meta.get("generation"), meta.get("deletionTimestamp")


def _state(body: Mapping[str, Any]) -> object:
    """Returns counts, revisions and conditions; not the metrics, which change all the time."""
    status = body.get("status") or {}
    names = ("replicas", "readyReplicas", "updatedReplicas", "updatedReadyReplicas")
    conditions = [(entry["type"], entry["status"]) for entry in status.get("conditions", [])]
    return [status.get(name) for name in (*names, "revision", "template")], conditions


def _key(kind: str, body: Mapping[str, Any]) -> Key:
    return Key(kind, body["metadata"].get("namespace", ""), body["metadata"]["name"])


def make_registry(
    touches: Touches, configuration: Callable[[], Awaitable[client.Configuration]]
) -> kopf.OperatorRegistry:
    """Makes the handlers. kopf calls `configuration` again whenever the API server asks for a
    login.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: object) -> kopf.ConnectionInfo:
        return await _connection(await configuration())

    @kopf.on.event(*_selector("ModelService"), registry=registry)
    async def service(type: str | None, body: kopf.Body, **_: object) -> None:
        touches.service(type, body)

    for kind in KINDS:

        @kopf.on.event(*_selector(kind), registry=registry, param=kind)
        async def pool(type: str | None, body: kopf.Body, param: str = "", **_: object) -> None:
            touches.pool(param, type, body)

    for child_kind in _CHILDREN:

        @kopf.on.event(*_selector(child_kind), registry=registry)
        async def child(body: kopf.Body, **_: object) -> None:
            touches.child(body)

    return registry


def _selector(kind: str) -> tuple[str, str]:
    return RESOURCES[kind].api_version, RESOURCES[kind].plural


def make_settings() -> kopf.OperatorSettings:
    """Sets short waits, no Events of kopf itself, and no watch on namespaces or CRDs."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None
    settings.networking.connect_timeout = CONNECT_S
    settings.networking.request_timeout = REQUEST_S
    settings.watching.server_timeout = WATCH_S
    settings.watching.client_timeout = WATCH_S + REQUEST_S
    settings.watching.connect_timeout = CONNECT_S
    for kind in _CHILDREN:
        settings.watching.label_selectors[_selector(kind)] = SERVICE_LABEL
    return settings


async def watch(
    touches: Touches,
    configuration: Callable[[], Awaitable[client.Configuration]],
    *,
    namespaces: Iterable[str],
) -> None:
    """Runs kopf in a thread until it is cancelled; in all namespaces when none is named.

    Raises an error that kopf can't handle, such as missing rights. That thread calls `touches`.
    """
    loop, stop = asyncio.get_running_loop(), threading.Event()
    ended: asyncio.Future[Exception | None] = loop.create_future()

    async def run() -> None:
        error = None
        try:
            await _run_kopf(touches, configuration, list(namespaces), stop)
        except Exception as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop did not wait for it
            loop.call_soon_threadsafe(ended.set_result, error)

    # A daemon: a hanging call in kopf must not keep the process alive.
    thread = threading.Thread(target=lambda: run_alone(run()), name="kopf", daemon=True)
    thread.start()
    try:
        error = await asyncio.shield(ended)
    finally:
        stop.set()
        await asyncio.wait([ended], timeout=STOP_S)
    raise error or MillraceError("kopf has ended")


def run_alone(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` in an event loop of its own. Tasks that stay after it have STOP_S to end: kopf's
    watches swallow their cancellation while no API server answers, and `asyncio.run` would wait for
    them for ever.
    """
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=STOP_S))
        loop.set_exception_handler(lambda *_: None)  # of tasks that are still there
    finally:
        loop.close()


async def _run_kopf(
    touches: Touches,
    configuration: Callable[[], Awaitable[client.Configuration]],
    namespaces: list[str],
    stop: threading.Event,
) -> None:
    # kopf warns that it gets no signals; this is why it has a thread of its own.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=make_registry(touches, configuration),
        settings=make_settings(),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
        stop_flag=stop,
    )
    ending = asyncio.create_task(kopf.run_tasks(tasks, ignored=others))
    # Once one of its tasks ends, all should end. Some hang when another task has failed.
    failed, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait([ending], timeout=STOP_S)
    for task in failed:
        task.result()


async def _connection(configuration: client.Configuration) -> kopf.ConnectionInfo:
    """Converts the `kubernetes` package's settings for kopf."""
    # "Bearer TOKEN", "bearer TOKEN" from a service account, or "Basic USER:PASSWORD".
    header = await configuration.get_api_key_with_prefix("BearerToken") or ""
    scheme, _, token = header.partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme.capitalize() or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
