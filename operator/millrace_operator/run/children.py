"""The objects that the operator makes for its owners: Deployments, Services and so on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millrace.core.errors import MillraceError
from millrace_operator.manifests.naming import APPLIED, MANAGER
from millrace_operator.observed import Object
from millrace_operator.run.kube import Kube, KubeRefused


class OwnerGone(MillraceError):
    """The object was deleted during its pass: the operator makes nothing more for it."""


class Children:
    """Applies children, and finds those that others have changed since."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        #: Answers to the last apply, by the UIDs of owner and child: a differing object has
        #: drifted.
        self._applied: dict[str, dict[str, dict[str, Any]]] = {}

    def by_name(
        self, owner_uid: str, lists: Iterable[Iterable[dict[str, Any]]]
    ) -> dict[tuple[str, str], Object]:
        """Returns objects by kind and name. An object that others changed loses the mark of its
        last apply.
        """
        applied = self._applied.get(owner_uid, {})
        return {
            (obj["kind"], obj["metadata"]["name"]): _checked(obj, applied)
            for objects in lists
            for obj in objects
        }

    async def apply(self, owner: Object, manifest: Mapping[str, Any]) -> None:
        """Applies a manifest, but only onto an object of its controller, which is `owner` or a pod
        of it: a force apply would take any object.

        An apply makes a missing object. An existing child is applied by its UID, so that the API
        server refuses to make it again if it was deleted since. Before a child is made or taken
        over, its controller is read again, as Kubernetes' own controllers do. If the controller is
        deleted even later, the child's ownerReference names the UID of the deleted controller, and
        the garbage collector removes the child.
        """
        meta = manifest["metadata"]
        where = manifest["kind"], meta.get("namespace", ""), meta["name"]
        [controller] = meta["ownerReferences"]
        there = await self._kube.get(*where)
        if there is not None and not _is_child(there, controller["uid"]):
            raise KubeRefused(f"{where[0]} {where[2]} exists and is not the operator's", status=409)
        if there is None or not _controllers(there):
            await self._check_exists(controller, meta["namespace"])
        if there is not None:
            manifest = {**manifest, "metadata": {**meta, "uid": there["metadata"]["uid"]}}
        applied = await self._kube.apply(manifest)
        children = self._applied.setdefault(owner["metadata"]["uid"], {})
        children[applied["metadata"]["uid"]] = _asked(applied)

    def forget(self, owner_uid: str) -> None:
        """Forgets the children of an owner that is gone."""
        self._applied.pop(owner_uid, None)

    async def _check_exists(self, controller: Mapping[str, Any], namespace: str) -> None:
        """Raises OwnerGone when the object with the controller's UID is gone or being deleted."""
        kind, name = controller["kind"], controller["name"]
        now = await self._kube.get(kind, namespace, name)
        found = now["metadata"] if now is not None else {}
        if found.get("uid") != controller["uid"] or "deletionTimestamp" in found:
            raise OwnerGone(f"{kind} {namespace}/{name} was deleted")


def _checked(obj: dict[str, Any], applied: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the object, without the mark of its last apply if it has changed since."""
    meta = obj["metadata"]
    if APPLIED not in meta.get("annotations", {}) or applied.get(meta["uid"]) == _asked(obj):
        return obj
    annotations = {k: v for k, v in meta["annotations"].items() if k != APPLIED}
    return {**obj, "metadata": {**meta, "annotations": annotations}}


def _is_child(obj: Object, uid: str) -> bool:
    """Returns whether the controller `uid` controls the object, or may take it over from a deleted
    controller of its name.
    """
    if controllers := _controllers(obj):
        return controllers == [uid]
    labels = obj["metadata"].get("labels", {})
    return bool(labels.get("app.kubernetes.io/managed-by") == MANAGER)


def _controllers(obj: Object) -> list[str]:
    """Returns the UID of the object's controller, if it has one."""
    references = obj["metadata"].get("ownerReferences", [])
    return [ref["uid"] for ref in references if ref.get("controller")]


def _asked(obj: Object) -> dict[str, Any]:
    """Returns the wanted fields: all but the status and the API server's bookkeeping."""
    books = ("resourceVersion", "managedFields")
    meta = {name: value for name, value in obj["metadata"].items() if name not in books}
    return {name: value for name, value in obj.items() if name != "status"} | {"metadata": meta}
