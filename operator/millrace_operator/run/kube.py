"""Makes the operator's calls to the Kubernetes API.

Objects are dicts as the API server gives them. `kubernetes.aio` does authentication, TLS and
connections. Nothing is retried here: the work queue retries, and knows how often an object has
failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.config.kube_config import KubeConfigLoader

from millrace.core.errors import MillraceError
from millrace_operator.manifests.naming import MANAGER
from millrace_operator.schema import API_VERSION
from millrace_operator.schema.pools import KINDS

#: Field manager of the replicas that the operator's autoscaler sets; MANAGER is that of the objects
#: that the operator applies.
AUTOSCALER = "millrace-autoscaler"

#: Timeout in seconds, to connect and between two packets of an answer.
TIMEOUT_S = 10.0

#: Objects of one page of a list.
PAGE = 500

#: Status, headers and body of an answer.
_Answer = tuple[int, Mapping[str, str], Mapping[str, Any]]

#: Statuses of temporary errors. 409: the object has changed, observe again.
_RETRYABLE = frozenset({401, 404, 408, 409, 410, 429})

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"


class KubeError(MillraceError):
    """The API server can't answer now: observe again, then try again.

    `status` is the HTTP status (0: no answer); `retry_after_s` is the server's Retry-After, or 0.
    """

    def __init__(self, message: str, *, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class KubeRefused(MillraceError):
    """The API server refuses the request, or this account has no right to it: a person must act."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Resource:
    """The API group, version and plural of a kind."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Returns the URL's path of one object, or of all (in every namespace when `namespace` is
        "").
        """
        root = "/api/" if self.api_version == "v1" else "/apis/"
        parts = [self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        return root + "/".join([*parts, *filter(None, [self.plural, name, subresource])])


RESOURCES = {
    **{kind: Resource(API_VERSION, f"{kind.lower()}s") for kind in ("ModelService", *KINDS)},
    "StatefulSet": Resource("apps/v1", "statefulsets"),
    "Deployment": Resource("apps/v1", "deployments"),
    "LeaderWorkerSet": Resource("leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
    "Pod": Resource("v1", "pods"),
    "Service": Resource("v1", "services"),
    "ConfigMap": Resource("v1", "configmaps"),
    "ResourceQuota": Resource("v1", "resourcequotas"),
    "PodDisruptionBudget": Resource("policy/v1", "poddisruptionbudgets"),
    "Lease": Resource("coordination.k8s.io/v1", "leases"),
    "Event": Resource("events.k8s.io/v1", "events"),
    "CustomResourceDefinition": Resource(
        "apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False
    ),
}


async def load_configuration(kubeconfig: str = "", context: str = "") -> client.Configuration:
    """Loads a kubeconfig if one is named, else the pod's service account, else the user's
    kubeconfig.

    Tokens that expire are renewed during calls. Raises MillraceError when there is none.
    """
    configuration = client.Configuration()
    if not kubeconfig and not context:
        with contextlib.suppress(config.ConfigException):
            config.load_incluster_config(configuration)
            return configuration
    try:
        loader = await config.load_kube_config(
            kubeconfig or None, context or None, configuration, persist_config=False
        )
    except config.ConfigException as error:
        raise MillraceError(f"no access to a Kubernetes cluster: {error}") from error
    if loader.provider or getattr(loader, "exec_plugin_expiry", None):
        configuration.refresh_api_key_hook = _renewal(loader)
    return configuration


def _renewal(loader: KubeConfigLoader) -> Callable[[client.Configuration], Awaitable[None]]:
    """Returns a hook that asks a kubeconfig's plugin or provider again once its token expires."""
    lock = asyncio.Lock()

    async def renew(configuration: client.Configuration) -> None:
        async with lock:
            await loader.load_and_set(configuration)

    return renew


class Kube:
    """Calls the API server. Every call raises KubeError and KubeRefused. Close it after use."""

    def __init__(
        self,
        configuration: client.Configuration,
        *,
        connections: int = 16,
        timeout_s: float = TIMEOUT_S,
        on_call: Callable[[str, int], None] = lambda verb, status: None,
    ) -> None:
        """`on_call` gets every answer: the HTTP verb and the status, 0 without an answer."""
        self._api = client.ApiClient(configuration)
        self._api.user_agent = MANAGER
        self._free = asyncio.Semaphore(connections)
        self._started: set[asyncio.Task[_Answer]] = set()
        self._timeout = aiohttp.ClientTimeout(sock_connect=timeout_s, sock_read=timeout_s)
        self._on_call = on_call

    async def close(self) -> None:
        """Waits for the started calls, also for those whose callers were cancelled."""
        while self._started:
            await asyncio.wait(self._started)
        await self._api.close()

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """Returns an object; None when it is missing."""
        return await self._call("GET", RESOURCES[kind].path(namespace, name))

    async def list(self, kind: str, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """Returns all objects that a label selector finds, each with its apiVersion and kind."""
        resource, items, token = RESOURCES[kind], [], ""
        while True:
            query = {"limit": str(PAGE), "labelSelector": selector, "continue": token}
            page = await self._call("GET", resource.path(namespace), query)
            if page is None:
                raise KubeError(f"the API server does not know {resource.plural}", status=404)
            items += page.get("items", [])
            token = page.get("metadata", {}).get("continue", "")
            if not token:
                return [{"apiVersion": resource.api_version, "kind": kind} | item for item in items]

    async def apply(self, manifest: Mapping[str, Any], manager: str = MANAGER) -> dict[str, Any]:
        """Applies a whole object on the server side with force; returns the object as it is now."""
        return _found(await self._apply(manifest, "", manager))

    async def patch_status(self, obj: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Replaces the operator's fields of the status; does nothing when `obj` is gone."""
        meta = {name: obj["metadata"][name] for name in ("name", "namespace", "uid")}
        manifest = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": meta}
        await self._apply({**manifest, "status": status}, "status")

    async def scale(self, kind: str, namespace: str, name: str, replicas: int) -> None:
        """Sets spec.replicas through the scale subresource, as an HPA does."""
        path = RESOURCES[kind].path(namespace, name, "scale")
        body = {"spec": {"replicas": replicas}}
        await self._call("PATCH", path, {"fieldManager": AUTOSCALER}, body, _MERGE)

    async def delete(self, kind: str, namespace: str, name: str, uid: str = "") -> None:
        """Deletes an object, which may be gone. With `uid`, only that object (else KubeError,
        409).
        """
        body: dict[str, Any] = {"propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        await self._call("DELETE", RESOURCES[kind].path(namespace, name), {}, body)

    async def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Makes an object. If it exists: KubeError, 409."""
        path = RESOURCES[manifest["kind"]].path(manifest["metadata"]["namespace"])
        return _found(await self._call("POST", path, {"fieldManager": MANAGER}, manifest))

    async def replace(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Replaces an object. If it has changed since `manifest` was read: KubeError, 409."""
        meta = manifest["metadata"]
        path = RESOURCES[manifest["kind"]].path(meta["namespace"], meta["name"])
        return _found(await self._call("PUT", path, {"fieldManager": MANAGER}, manifest))

    async def served(self, api_version: str) -> frozenset[str]:
        """Returns the plural names of a group and version's resources; empty when it is not
        known.
        """
        answer = await self._call("GET", f"/apis/{api_version}") or {}
        return frozenset(entry["name"] for entry in answer.get("resources", []))

    async def _apply(
        self, manifest: Mapping[str, Any], subresource: str, manager: str = MANAGER
    ) -> dict[str, Any] | None:
        meta = manifest["metadata"]
        path = RESOURCES[manifest["kind"]].path(
            meta.get("namespace", ""), meta["name"], subresource
        )
        query = {"fieldManager": manager, "force": "true"}
        return await self._call("PATCH", path, query, manifest, _APPLY)

    async def _call(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any] | None:
        async with self._free:
            send = self._send(verb, path, query or {}, body, content_type)
            call = asyncio.create_task(send)
            self._started.add(call)
            call.add_done_callback(self._started.discard)
            # A started write ends although its caller is cancelled: `close` waits for it.
            status, headers, answer = await asyncio.shield(call)
        self._on_call(verb, status)
        if 200 <= status < 300:
            return dict(answer)
        if status == 404:
            return None
        message = f"{verb} {path}: {answer.get('message') or status or 'no answer'}"
        if status in _RETRYABLE or not 400 <= status < 500:
            retry_after_s = _seconds(headers.get("Retry-After", ""))
            raise KubeError(message, status=status, retry_after_s=retry_after_s)
        raise KubeRefused(message, status=status)

    async def _send(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None,
        content_type: str,
    ) -> _Answer:
        """Returns status, headers and body; without an answer, status 0 and a message with the
        reason.
        """
        headers = {"Accept": "application/json", "Content-Type": content_type}
        try:
            request = await self._api.param_serialize(
                verb,
                path,
                query_params=[(name, value) for name, value in query.items() if value],
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await self._api.call_api(*request, _request_timeout=self._timeout)
            text = await response.read()
        except (aiohttp.ClientError, OSError, config.ConfigException) as error:
            return 0, {}, {"message": f"no answer: {error}"}
        try:
            answer = json.loads(text)
        except ValueError:  # from a proxy or load balancer before the API server
            answer = {"message": text[:200].decode(errors="replace")}
        return response.status, response.headers, answer if isinstance(answer, dict) else {}


def micro_time() -> str:
    """Returns the time now as the API's MicroTime."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _found(answer: dict[str, Any] | None) -> dict[str, Any]:
    if answer is None:
        raise KubeError("no such namespace or kind, or the object is gone", status=404)
    return answer


def _seconds(retry_after: str) -> float:
    """Returns the seconds of a Retry-After header; 0 for a date, which the API server never
    sends.
    """
    return float(retry_after) if retry_after.isdecimal() else 0.0
