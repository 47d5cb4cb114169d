"""Merges the user's pod template over the operator's, and hashes the result to find old pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace_operator.spec import SpecError

#: Lists whose entries have a key. A user's entry replaces the operator's entry of the same key.
_REPLACED_BY = {
    "env": "name",
    "ports": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
}
#: Lists whose entries are merged with the operator's entry of the same name.
_MERGED_BY = {"containers": "name", "initContainers": "name"}


def merged(base: Mapping[str, Any], over: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Merges `over` into `base`: mappings key by key, known lists by their keys; the rest is
    replaced.

    None removes a key. Raises SpecError where `over` has another type than `base`.
    """
    result = dict(base)
    for key, value in over.items():
        if value is None:
            result.pop(key, None)
        elif key in result or key in _REPLACED_BY or key in _MERGED_BY:
            result[key] = _merged_value(key, result.get(key), value, f"{path}.{key}")
        else:
            result[key] = value
    return result


def _merged_value(key: str, base: Any, over: Any, path: str) -> Any:  # noqa: ANN401 - any JSON
    if key in _REPLACED_BY or key in _MERGED_BY:
        return _merged_list(key, _entries(base or [], key, path), _entries(over, key, path), path)
    if isinstance(base, Mapping):
        if not isinstance(over, Mapping):
            raise SpecError(f"{path} is {over!r}; it must be a mapping")
        return merged(base, over, path)
    return over


def _merged_list(
    key: str, base: Mapping[str, Any], over: Mapping[str, Any], path: str
) -> list[Any]:
    result = dict(base)
    for name, entry in over.items():
        deep = key in _MERGED_BY and name in result
        result[name] = merged(result[name], entry, f"{path}[{name}]") if deep else entry
    return list(result.values())


def _entries(value: Any, key: str, path: str) -> dict[str, Any]:  # noqa: ANN401
    """Returns a list's entries by their key, in order."""
    known_by = _REPLACED_BY.get(key) or _MERGED_BY[key]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise SpecError(f"{path} is {value!r}; it must be a list")
    found: dict[str, Any] = {}
    for index, entry in enumerate(value):
        if not isinstance(entry, Mapping):
            raise SpecError(f"{path}[{index}] is {entry!r}; it must be a mapping")
        name = entry.get(known_by, entry.get("containerPort") if key == "ports" else None)
        if name is None:
            raise SpecError(f"{path}[{index}] has no {known_by}; it must have one")
        found[str(name)] = entry
    return found
