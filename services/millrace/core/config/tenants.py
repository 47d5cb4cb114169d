"""The tables of tenants and the weights of classes, which are no sections with fixed fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.weights import (
    DEFAULT_CLASS,
    DEFAULT_TENANT,
    Weights,
    is_weight,
    weight_range,
)

_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """A tenant: SHA-256 digests of its API keys in hexadecimal, and its weight."""

    key_sha256: tuple[str, ...] = ()
    weight: float = 1.0


def read_tenants(tables: Mapping[str, Any]) -> dict[str, TenantConfig]:
    """Builds the tenants from their tables. Raises ConfigError naming the field."""
    found: dict[str, TenantConfig] = {}
    owners: dict[str, str] = {}
    for name, table in tables.items():
        path = f"tenants.{name}"
        if not isinstance(table, dict):
            raise ConfigError(f"{path} is {table!r}; it must be a table")
        if unknown := table.keys() - {"key_sha256", "weight"}:
            raise ConfigError(f"unknown field {path}.{min(unknown)}; there are key_sha256, weight")
        digests = _digests(f"{path}.key_sha256", table.get("key_sha256", []))
        for digest in digests:
            if owners.setdefault(digest, name) != name:
                raise ConfigError(
                    f"{path}.key_sha256 has {digest}, which tenants.{owners[digest]} has, too; "
                    "a key must belong to one tenant"
                )
        weight = read_weight(f"{path}.weight", table.get("weight", 1.0))
        found[name] = TenantConfig(key_sha256=digests, weight=weight)
    return found


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
