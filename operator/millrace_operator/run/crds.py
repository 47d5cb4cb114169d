"""Brings the cluster's CustomResourceDefinitions to the version of this operator.

Helm applies a chart's `crds/` folder on install, never on upgrade; so the operator does. It uses
the field manager of the last apply: with a manager of its own, Helm's next install of another
version would end with a conflict.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from millrace.core.errors import MillraceError
from millrace_operator.manifests.naming import MANAGER
from millrace_operator.run.kube import RESOURCES, Kube, KubeError
from millrace_operator.schema import API_VERSION

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 2.0
WAIT_S = 60.0


def read_crds(folder: Path) -> list[dict[str, Any]]:
    """Reads the manifests in *.yaml of `folder`. Raises MillraceError when there is none."""
    manifests = [
        manifest
        for path in sorted(folder.glob("*.yaml"))
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]
    if not manifests:
        raise MillraceError(f"no CustomResourceDefinition in {folder}")
    return manifests


async def apply_crds(kube: Kube, manifests: Sequence[Mapping[str, Any]]) -> None:
    """Applies all on the server side. Raises KubeRefused, or KubeError after too many retries."""
    for manifest in manifests:
        await _patiently(partial(_apply, kube, manifest))
    log.info("%d CustomResourceDefinitions are this version's", len(manifests))


async def _apply(kube: Kube, manifest: Mapping[str, Any]) -> None:
    there = await kube.get(manifest["kind"], "", manifest["metadata"]["name"])
    await kube.apply(manifest, _applier(there) if there else MANAGER)


def _applier(crd: Mapping[str, Any]) -> str:
    """Returns the field manager of its schema."""
    owners = (
        entry["manager"]
        for entry in crd["metadata"].get("managedFields", ())
        if "f:versions" in entry["fieldsV1"].get("f:spec", {})
    )
    return next(owners, MANAGER)


async def wait_until_served(kube: Kube) -> None:
    """Raises MillraceError when the API server does not serve the operator's kinds in time."""
    wanted = {one.plural for one in RESOURCES.values() if one.api_version == API_VERSION}

    async def ask() -> None:
        if missing := wanted - await kube.served(API_VERSION):
            names = ", ".join(sorted(missing))
            raise KubeError(f"the cluster does not serve {names} of {API_VERSION}")

    await _patiently(ask)


async def is_served(kube: Kube, kind: str) -> bool:
    """Returns whether the API server serves a kind of others."""
    resource = RESOURCES[kind]
    return resource.plural in await _patiently(partial(kube.served, resource.api_version))


async def _patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Retries for WAIT_S while the API server is not able to answer, then raises its last
    KubeError.
    """
    clock = asyncio.get_running_loop().time
    until_s = clock() + WAIT_S
    while True:
        try:
            return await call()
        except KubeError as error:
            if clock() + RETRY_S > until_s:
                raise
            log.warning("%s", error)
        await asyncio.sleep(RETRY_S)
