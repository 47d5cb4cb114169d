"""The calls to the Kubernetes API that the operator makes, and no others.

Objects are dicts as the API server gives them. The `kubernetes` package does authentication, TLS
and connections; its calls block, so they run in threads of this client's own. Nothing is retried
here: the work queue does that, which knows how often an object has failed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import urllib3
from kubernetes import client, config

from millrace.core.errors import MillraceError

#: Manager of all that the operator applies, and of replicas that its autoscaler sets.
OPERATOR = "millrace-operator"
AUTOSCALER = "millrace-autoscaler"

#: To connect, and between two packets of an answer, in seconds.
TIMEOUT_S = 10.0

#: Objects of one page of a list.
PAGE = 500

#: Who answers so may answer otherwise in a moment. 409: the object has changed, observe again.
_RETRYABLE = frozenset({401, 404, 408, 409, 410, 429})

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"


class KubeError(MillraceError):
    """The API server can't do it now: observe again, then try again.

    `status` is the HTTP status (0: no answer), `retry_after_s` what the server asks for, or 0.
    """

    def __init__(self, message: str, *, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class KubeRefused(MillraceError):
    """The API server refuses what is asked, or lets others only ask it: somebody must act."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Resource:
    """Where a kind lives."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """The URL's path of one object, or of all (in every namespace when `namespace` is "")."""
        root = "/api/" if self.api_version == "v1" else "/apis/"
        parts = [self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        return root + "/".join([*parts, *filter(None, [self.plural, name, subresource])])


MILLRACE = "millrace.dev/v1alpha1"

RESOURCES = {
    "ModelService": Resource(MILLRACE, "modelservices"),
    "PrefillGroup": Resource(MILLRACE, "prefillgroups"),
    "DecodePool": Resource(MILLRACE, "decodepools"),
    "KVPWorkerPool": Resource(MILLRACE, "kvpworkerpools"),
    "StatefulSet": Resource("apps/v1", "statefulsets"),
    "Deployment": Resource("apps/v1", "deployments"),
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


def load_configuration(kubeconfig: str = "", context: str = "") -> client.Configuration:
    """From a kubeconfig when one is named, else from the pod's service account, else the user's.

    Raises MillraceError when there is none.
    """
    configuration = client.Configuration()
    kube = partial(
        config.load_kube_config, client_configuration=configuration, persist_config=False
    )
    try:
        if kubeconfig or context:
            kube(config_file=kubeconfig or None, context=context or None)
        else:
            try:
                config.load_incluster_config(client_configuration=configuration)
            except config.ConfigException:
                kube()
    except config.ConfigException as error:
        raise MillraceError(f"no access to a Kubernetes cluster: {error}") from error
    return configuration


class Kube:
    """Raises KubeError and KubeRefused from every call. Close it."""

    def __init__(
        self,
        configuration: client.Configuration,
        *,
        threads: int = 16,
        timeout_s: float = TIMEOUT_S,
        on_call: Callable[[str, int], None] = lambda verb, status: None,
    ) -> None:
        """`on_call` hears of every answer: the HTTP verb and the status, 0 without an answer."""
        configuration.retries = False
        configuration.connection_pool_maxsize = threads
        self._api = client.ApiClient(configuration)
        self._api.user_agent = OPERATOR
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kube")
        self._timeout_s = timeout_s
        self._on_call = on_call

    def close(self) -> None:
        """Waits for the calls that have begun, and drops the others. It blocks."""
        self._threads.shutdown(cancel_futures=True)
        self._api.close()

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """None when there is none."""
        return await self._call("GET", RESOURCES[kind].path(namespace, name))

    async def list(self, kind: str, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """All objects that a label selector finds, each with its apiVersion and kind."""
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

    async def apply(self, manifest: Mapping[str, Any], manager: str = OPERATOR) -> dict[str, Any]:
        """Server-side apply of a whole object with force; answers with the object as it is now."""
        return _found(await self._apply(manifest, "", manager))

    async def patch_status(self, obj: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Makes `status` the whole of what the operator says; nothing when `obj` is gone."""
        meta = {name: obj["metadata"][name] for name in ("name", "namespace", "uid")}
        manifest = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": meta}
        await self._apply({**manifest, "status": status}, "status")

    async def scale(self, kind: str, namespace: str, name: str, replicas: int) -> None:
        """Sets spec.replicas through the scale subresource, as an HPA does."""
        path = RESOURCES[kind].path(namespace, name, "scale")
        body = {"spec": {"replicas": replicas}}
        await self._call("PATCH", path, {"fieldManager": AUTOSCALER}, body, _MERGE)

    async def delete(self, kind: str, namespace: str, name: str, uid: str = "") -> None:
        """Gone is fine. With `uid`, only that very object (another one: KubeError, 409)."""
        body: dict[str, Any] = {"propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        await self._call("DELETE", RESOURCES[kind].path(namespace, name), {}, body)

    async def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """One that exists: KubeError, 409."""
        path = RESOURCES[manifest["kind"]].path(manifest["metadata"]["namespace"])
        return _found(await self._call("POST", path, {"fieldManager": OPERATOR}, manifest))

    async def replace(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """One that has changed since `manifest` was read: KubeError, 409."""
        meta = manifest["metadata"]
        path = RESOURCES[manifest["kind"]].path(meta["namespace"], meta["name"])
        return _found(await self._call("PUT", path, {"fieldManager": OPERATOR}, manifest))

    async def served(self, api_version: str) -> frozenset[str]:
        """Plural names of the resources of a group and version; empty when it is not known."""
        answer = await self._call("GET", f"/apis/{api_version}") or {}
        return frozenset(entry["name"] for entry in answer.get("resources", []))

    async def _apply(
        self, manifest: Mapping[str, Any], subresource: str, manager: str = OPERATOR
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
        send = partial(self._send, verb, path, query or {}, body, content_type)
        status, headers, answer = await asyncio.get_running_loop().run_in_executor(
            self._threads, send
        )
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

    def _send(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None,
        content_type: str,
    ) -> tuple[int, Mapping[str, str], Mapping[str, Any]]:
        """Status, headers and body; the status is 0 and the message says why without an answer."""
        headers = {"Accept": "application/json", "Content-Type": content_type}
        request = self._api.param_serialize(
            verb,
            path,
            query_params=[(name, value) for name, value in query.items() if value],
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._api.call_api(*request, _request_timeout=self._timeout_s)
            text = response.read()
        except (urllib3.exceptions.HTTPError, OSError, client.ApiException) as error:
            return 0, {}, {"message": f"no answer: {error}"}
        try:
            answer = json.loads(text)
        except ValueError:  # a proxy or load balancer before the API server
            answer = {"message": text[:200].decode(errors="replace")}
        return response.status, response.headers, answer if isinstance(answer, dict) else {}


def _found(answer: dict[str, Any] | None) -> dict[str, Any]:
    if answer is None:
        raise KubeError("no such namespace or kind, or the object is gone", status=404)
    return answer


def _seconds(retry_after: str) -> float:
    """Of a Retry-After header; a date, which the API server never sends, counts as nothing."""
    return float(retry_after) if retry_after.isdecimal() else 0.0
