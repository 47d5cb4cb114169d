"""The tables of tenants and the weights of classes, which are no sections with fixed fields."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.limits.rules import MOST_PER_DAY, MOST_PER_MINUTE, Limits
from millrace.core.weights import (
    BATCH_CLASS,
    DEFAULT_CLASS,
    DEFAULT_TENANT,
    Weights,
    is_weight,
    weight_range,
)

_DIGEST = re.compile("[0-9a-f]{64}")
_LIMITS = tuple(f.name for f in fields(Limits))
_ACCESS = ("models", "slo_classes", *_LIMITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a tenant or a key may use.

    `models` and `slo_classes` name what is allowed; empty: everything. The first of `slo_classes`
    is the class of requests that name none.
    """

    models: tuple[str, ...] = ()
    slo_classes: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConfig:
    """An API key with a name and an access of its own, inside the access of its tenant."""

    sha256: str
    name: str
    access: Access


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """A tenant: its weight, its access, and its keys.

    `key_sha256` are SHA-256 digests of API keys in hexadecimal; `keys` are further keys.
    """

    key_sha256: tuple[str, ...] = ()
    weight: float = 1.0
    access: Access = field(default_factory=Access)
    keys: tuple[KeyConfig, ...] = ()

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of all keys."""
        return (*self.key_sha256, *(key.sha256 for key in self.keys))


def read_tenants(tables: Mapping[str, Any]) -> dict[str, TenantConfig]:
    """Builds the tenants from their tables. Raises ConfigError naming the field."""
    if "" in tables:
        raise ConfigError("tenants has a table with the name ''; a tenant must have a name")
    found = {name: _tenant(f"tenants.{name}", table) for name, table in tables.items()}
    owners: dict[str, str] = {}
    for name, tenant in found.items():
        for digest in tenant.digests:
            if owners.setdefault(digest, name) != name:
                raise ConfigError(
                    f"tenants.{name}.key_sha256 has {digest}, which tenants.{owners[digest]} has, "
                    "too; a key must belong to one tenant"
                )
    return found


def read_keys_file(text: str) -> dict[str, TenantConfig]:
    """Builds the tenants of a file of keys: TOML with the tables of `tenants` alone.

    Raises ConfigError naming the field.
    """
    try:
        tree = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"no TOML: {error}") from error
    if unknown := tree.keys() - {"tenants"}:
        raise ConfigError(f"unknown section {min(unknown)!r}; there is tenants")
    tables = tree.get("tenants", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"tenants is {tables!r}; it must be a table")
    for name, table in tables.items():
        if isinstance(table, dict) and "weight" in table:
            raise ConfigError(
                f"tenants.{name}.weight is for the scheduler, which does not read this file; set "
                "it in the settings"
            )
    return read_tenants(tables)


def with_keys(
    tenants: Mapping[str, TenantConfig], more: Mapping[str, TenantConfig]
) -> dict[str, TenantConfig]:
    """Returns the tenants of both. The access that `more` gives a tenant replaces the other.

    Raises ConfigError if two tenants have the same key.
    """
    merged = dict(tenants)
    owners = {digest: name for name, one in tenants.items() for digest in one.digests}
    for name, one in more.items():
        for digest in one.digests:
            if owners.get(digest, name) != name:
                raise ConfigError(
                    f"tenants.{name} has the key {digest}, which tenants.{owners[digest]} has, "
                    "too; a key must belong to one tenant"
                )
        known = tenants.get(name, TenantConfig())
        merged[name] = TenantConfig(
            key_sha256=(*known.key_sha256, *one.key_sha256),
            weight=known.weight,
            access=known.access if one.access == Access() else one.access,
            keys=(*known.keys, *one.keys),
        )
    return merged


def check_tenants(tenants: Mapping[str, TenantConfig], classes: Collection[str]) -> None:
    """Raises ConfigError if a tenant names a class that is not among `classes`, or if one of its
    keys allows what the tenant does not.
    """
    known = (DEFAULT_CLASS, BATCH_CLASS, *classes)
    for name, tenant in tenants.items():
        path, access = f"tenants.{name}", tenant.access
        _check_names(f"{path}.slo_classes", access.slo_classes, known)
        for i, key in enumerate(tenant.keys):
            inner = f"{path}.keys[{i}]"
            allowed = access.slo_classes or known
            _check_names(f"{inner}.slo_classes", key.access.slo_classes, allowed)
            _check_names(f"{inner}.models", key.access.models, access.models)


def _check_names(path: str, names: Iterable[str], allowed: Collection[str]) -> None:
    """Raises ConfigError for a name that is not allowed; empty `allowed`: all are."""
    if allowed and (unknown := set(names) - set(allowed)):
        raise ConfigError(f"{path} has {min(unknown)!r}; there are {', '.join(sorted(allowed))}")


def _tenant(path: str, table: object) -> TenantConfig:
    given = _known_fields(path, table, ("key_sha256", "weight", "keys", *_ACCESS))
    keys = given.get("keys", [])
    if not isinstance(keys, list):
        raise ConfigError(f"{path}.keys is no list of tables")
    return TenantConfig(
        key_sha256=_digests(f"{path}.key_sha256", given.get("key_sha256", [])),
        weight=read_weight(f"{path}.weight", given.get("weight", 1.0)),
        access=_access(path, given),
        keys=tuple(_key(f"{path}.keys[{i}]", one) for i, one in enumerate(keys)),
    )


def _key(path: str, table: object) -> KeyConfig:
    given = _known_fields(path, table, ("sha256", "name", *_ACCESS))
    [digest] = _digests(f"{path}.sha256", str(given.get("sha256", "")))
    name = given.get("name", "")
    if not isinstance(name, str):
        raise ConfigError(f"{path}.name is {name!r}; it must be a text")
    return KeyConfig(sha256=digest, name=name or digest[:8], access=_access(path, given))


def _known_fields(path: str, table: object, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"{path} is {table!r}; it must be a table")
    if unknown := table.keys() - set(known):
        raise ConfigError(f"unknown field {path}.{min(unknown)}; there are {', '.join(known)}")
    return table


def _access(path: str, given: Mapping[str, Any]) -> Access:
    return Access(
        models=_names(f"{path}.models", given.get("models", [])),
        slo_classes=_names(f"{path}.slo_classes", given.get("slo_classes", [])),
        limits=Limits(**{name: _limit(f"{path}.{name}", given.get(name, 0)) for name in _LIMITS}),
    )


def _limit(path: str, value: object) -> int:
    most = MOST_PER_DAY if path.endswith("_per_day") else MOST_PER_MINUTE
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most:
        return value
    raise ConfigError(f"{path} is {value!r}; it must be a whole number from 0 (no limit) to {most}")


def _names(path: str, value: object) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given):
        raise ConfigError(f"{path} is {value!r}; it must be a name, or a list of names")
    return tuple(given)


def _digests(path: str, value: object) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(
        isinstance(one, str) and _DIGEST.fullmatch(one.lower()) for one in given
    ):
        # The value is not shown: it may be the key itself, written here by mistake.
        raise ConfigError(
            f"{path} is no SHA-256 digest; it must be 64 hexadecimal digits, or a list of such"
        )
    return tuple(one.lower() for one in given)


def read_weight(path: str, value: object) -> float:
    """Returns the weight. Raises ConfigError naming the field."""
    if isinstance(value, int | float) and not isinstance(value, bool) and is_weight(value):
        return float(value)
    raise ConfigError(f"{path} is {value!r}; it must be a number {weight_range()}")


def weights_of(
    classes: Iterable[str],
    class_weights: Mapping[str, float],
    tenants: Mapping[str, TenantConfig],
) -> Weights:
    """Returns the weight of every class and every tenant, the default ones included."""
    return Weights(
        classes={name: class_weights.get(name, 1.0) for name in (DEFAULT_CLASS, *classes)},
        tenants={DEFAULT_TENANT: 1.0} | {name: one.weight for name, one in tenants.items()},
    )
