"""Small ModelServices and pools, as a user writes them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from support.kube_api import Object

VERSION = "millrace.dev/v1alpha1"
POOLS = ("PrefillGroup", "DecodePool", "KVPWorkerPool")

CHART = Path(__file__).parents[2] / "charts" / "millrace"


def crds() -> list[Object]:
    return [yaml.safe_load(path.read_text()) for path in sorted((CHART / "crds").glob("*.yaml"))]


def service(name: str = "chat", namespace: str = "default", **spec: Any) -> Object:
    """A ModelService; `spec` is merged over three lines."""
    least = {"model": {"name": "tiny", "uri": "/models/tiny"}, "prefill": {}, "decode": {}}
    return _object("ModelService", name, namespace, merged(least, spec))


def pool(kind: str, name: str = "pool", namespace: str = "default", **spec: Any) -> Object:
    """A pool of the service `chat`."""
    return _object(kind, name, namespace, merged({"serviceRef": {"name": "chat"}}, spec))


def merged(base: Any, over: Any) -> Any:
    """Merges `over` into `base`, mapping by mapping; None removes a field."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return deepcopy(over)
    together = deepcopy(base)
    for key, value in over.items():
        if value is None:
            together.pop(key, None)
        else:
            together[key] = merged(together.get(key), value)
    return together


def _object(kind: str, name: str, namespace: str, spec: Object) -> Object:
    meta = {"name": name, "namespace": namespace}
    return {"apiVersion": VERSION, "kind": kind, "metadata": meta, "spec": spec}
