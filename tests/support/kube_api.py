"""Plain calls to a Kubernetes API server, as a user with a credential makes them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kubernetes import client

from support.deadlines import HANG_S

Object = dict[str, Any]

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"

#: Timeout in seconds of one call, and of actions that take a moment on an idle machine.
WAIT_S = HANG_S

T = TypeVar("T")


class Refused(Exception):
    """The API server's answer to a call that it refused."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Resource:
    """The path at which a kind is served."""

    path: str  # of its group and version
    plural: str
    namespaced: bool
    verbs: frozenset[str]


class Api:
    """One user's client of an API server. Calls raise Refused."""

    def __init__(self, configuration: client.Configuration) -> None:
        configuration.retries = False
        self.configuration = configuration
        self._client = client.ApiClient(configuration)
        self._resources: dict[tuple[str, str], Resource] = {}

    def close(self) -> None:
        self._client.close()

    def call(
        self,
        verb: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Any:
        """Returns the decoded answer; plain text where the server sends no JSON.

        "Too many requests", which a changed CRD causes for a moment, is retried.
        """
        request = self._client.param_serialize(
            verb,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": accept, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        deadline_s = time.monotonic() + WAIT_S
        while True:
            response = self._client.call_api(*request, _request_timeout=WAIT_S)
            text = response.read().decode()
            if response.status != 429 or time.monotonic() > deadline_s:
                break
            time.sleep(0.1)
        if not 200 <= response.status < 300:
            try:
                message = json.loads(text)["message"]
            except (ValueError, KeyError):
                message = text
            raise Refused(response.status, message)
        return json.loads(text) if text.startswith(("{", "[")) else text

    def resources(self) -> dict[tuple[str, str], Resource]:
        """Returns all served kinds, by apiVersion and kind."""
        found = {}
        for root in ("/api", "/apis"):
            for group in self.call("GET", root, accept=DISCOVERY)["items"]:
                name = group["metadata"].get("name", "")
                for version in group["versions"]:
                    gv = f"{name}/{version['version']}" if name else version["version"]
                    for entry in version.get("resources", []):
                        kind = entry["responseKind"]["kind"]
                        found[gv, kind] = Resource(
                            path=f"{root}/{gv}",
                            plural=entry["resource"],
                            namespaced=entry["scope"] == "Namespaced",
                            verbs=frozenset(entry["verbs"]),
                        )
        return found

    def path(
        self,
        api_version: str,
        kind: str,
        namespace: str = "",
        name: str = "",
        subresource: str = "",
    ) -> str:
        key = (api_version, kind)
        if key not in self._resources:
            self._resources = self.resources()
        resource = self._resources[key]
        parts = [resource.path]
        if resource.namespaced and namespace:
            parts += ["namespaces", namespace]
        return "/".join([*parts, *filter(None, [resource.plural, name, subresource])])

    def apply(
        self,
        manifest: Object,
        *,
        manager: str = "tests",
        force: bool = False,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Object:
        """Applies on the server side; unknown and duplicate fields are errors."""
        query = {"fieldManager": manager, "fieldValidation": "Strict"}
        if force:
            query["force"] = "true"
        if dry_run:
            query["dryRun"] = "All"
        path = self.path(*_where(manifest), subresource)
        return self.call("PATCH", path, manifest, query=query, content_type=APPLY)

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> Object | None:
        """Returns the object; None when there is none."""
        try:
            return self.call("GET", self.path(api_version, kind, namespace, name))
        except Refused as refused:
            if refused.status != 404:
                raise
            return None

    def list(
        self, api_version: str, kind: str, namespace: str = "", selector: str = ""
    ) -> list[Object]:
        query = {"labelSelector": selector} if selector else {}
        items = self.call("GET", self.path(api_version, kind, namespace), query=query)["items"]
        return [{"apiVersion": api_version, "kind": kind, **item} for item in items]

    def merge(
        self, obj: Object, patch: Object, subresource: str = "", *, manager: str = "tests"
    ) -> Object:
        """Merges a patch into the object that `obj` names."""
        path = self.path(*_where(obj), subresource)
        return self.call("PATCH", path, patch, query={"fieldManager": manager}, content_type=MERGE)

    def delete(self, obj: Object, *, grace_s: int | None = None) -> None:
        """Deletes in the background; the object may be gone."""
        body: Object = {"propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            self.call("DELETE", self.path(*_where(obj)), body)
        except Refused as refused:
            if refused.status != 404:
                raise


def _where(obj: Object) -> tuple[str, str, str, str]:
    meta = obj["metadata"]
    return obj["apiVersion"], obj["kind"], meta.get("namespace", ""), meta["name"]


def eventually(check: Callable[[], T], timeout_s: float = WAIT_S, *, what: str = "") -> T:
    """Returns the first true answer of `check`; fails with the last one. Refused counts as not
    yet.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            value: Any = check()
        except Refused as refused:
            value, failure = None, refused
        else:
            failure = None
        if value:
            return value
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what or 'still'} {failure or value!r} after {timeout_s:g} s")
        time.sleep(0.1)


async def soon(check: Callable[[], T], timeout_s: float = WAIT_S, *, what: str = "") -> T:
    """Works as `eventually` for tests with tasks of their own, which continue during it."""
    return await asyncio.to_thread(eventually, check, timeout_s, what=what)


def condition(obj: Object | None, name: str) -> str:
    """Returns the status of a condition; "" when it is missing."""
    conditions = (obj or {}).get("status", {}).get("conditions", [])
    return next((c["status"] for c in conditions if c["type"] == name), "")
