"""The one configuration tree: frozen, keyword-only, validated when built.

Every message names the field by its dotted path, the value and the range. Units are in the names.
Files are TOML; a file's tables are the sections below, and `--set section.field=value` on any
command overrides one field.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from millrace.core.config.auth import AuthConfig
from millrace.core.config.engine import EngineConfig, MixedConfig, TransferConfig
from millrace.core.config.files import BatchesConfig, FilesConfig
from millrace.core.config.proxy import ProxyConfig
from millrace.core.config.scheduler import SchedulerConfig
from millrace.core.config.shared import ScalingConfig, StoreConfig, TelemetryConfig, TlsConfig
from millrace.core.config.tenants import (
    TenantConfig,
    check_tenants,
    read_tenants,
    read_weight,
    weights_of,
)
from millrace.core.errors import ConfigError, reason_of
from millrace.core.request import Slo
from millrace.core.weights import Weights

__all__ = [
    "AuthConfig",
    "BatchesConfig",
    "Config",
    "EngineConfig",
    "FilesConfig",
    "MixedConfig",
    "ProxyConfig",
    "ScalingConfig",
    "SchedulerConfig",
    "Setting",
    "StoreConfig",
    "TelemetryConfig",
    "TenantConfig",
    "TlsConfig",
    "TransferConfig",
    "load_config",
    "settings",
    "with_settings",
]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole tree. `slo_classes` maps a class name (`x-millrace-class`) to its objectives.

    `class_weights` are the field `weight` of the same tables. `tenants` maps a name to its keys.
    """

    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    mixed: MixedConfig = field(default_factory=MixedConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    files: FilesConfig = field(default_factory=FilesConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    slo_classes: Mapping[str, Slo] = field(default_factory=lambda: types.MappingProxyType({}))
    class_weights: Mapping[str, float] = field(default_factory=dict)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)

    @property
    def weights(self) -> Weights:
        """Returns the weights of all classes and tenants."""
        return weights_of(self.slo_classes, self.class_weights, self.tenants)

    def __post_init__(self) -> None:
        if self.scheduler.lease_s < 2 * self.scheduler.heartbeat_s:
            raise ConfigError(
                f"scheduler.lease_s is {self.scheduler.lease_s:g}; it must be at least twice "
                f"scheduler.heartbeat_s ({self.scheduler.heartbeat_s:g})"
            )
        check_tenants(self.tenants, self.slo_classes)


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Builds the tree from a TOML file and `section.field=value` overrides, in that order.

    Raises ConfigError for an unknown section or field, a value of the wrong type or out of range.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # unreadable, not UTF-8 or not TOML
            raise ConfigError(f"config file {path}: {reason_of(error)}") from error
    for override in overrides:
        name, separator, text = override.partition("=")
        section, dot, key = name.partition(".")
        if not (separator and dot):
            raise ConfigError(f"--set {override!r}: write it as section.field=value")
        _table(section, tree.setdefault(section, {}))[key] = text
    return _build(tree)


def with_settings(config: Config, given: Mapping[str, Any], path: str) -> Config:
    """Returns the tree with other values of some fields, `section.field` each.

    Raises ConfigError, which names the field after `path`.
    """
    for dotted, value in given.items():
        section, _, name = dotted.partition(".")
        part = getattr(config, section)
        hint = typing.get_type_hints(type(part))[name]
        try:
            changed = dataclasses.replace(part, **{name: _coerce(dotted, hint, value)})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        config = dataclasses.replace(config, **{section: changed})
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of the tree, with its documentation."""

    section: str
    name: str
    default: Any
    range: str
    doc: str


def settings() -> Iterator[Setting]:
    """Yields every field of every section, in the order of the tree."""
    for section, cls in typing.get_type_hints(Config).items():
        if not dataclasses.is_dataclass(cls):
            continue
        for f in dataclasses.fields(cls):
            check = f.metadata.get("check")
            yield Setting(
                section=section,
                name=f.name,
                default=f.default,
                range=(check(math.nan) or "") if check is not None else "",
                doc=f.metadata.get("doc", ""),
            )


def _build(tree: dict[str, Any]) -> Config:
    sections = typing.get_type_hints(Config)
    del sections["class_weights"]
    if unknown := tree.keys() - sections.keys():
        raise ConfigError(
            f"unknown section {min(unknown)!r}; there are {', '.join(sorted(sections))}"
        )
    built: dict[str, Any] = {}
    for name, values in tree.items():
        table = _table(name, values)
        if name == "slo_classes":
            built["class_weights"] = _take_weights(table)
            built[name] = {cls: _slo(cls, given) for cls, given in table.items()}
        elif name == "tenants":
            built[name] = read_tenants(table)
        else:
            built[name] = _section(sections[name], name, table)
    return Config(**built)


def _table(path: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 - a file may hold any value
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is {value!r}; it must be a table")
    return value


def _take_weights(classes: dict[str, Any]) -> dict[str, float]:
    return {
        name: read_weight(f"slo_classes.{name}.weight", table.pop("weight"))
        for name, table in classes.items()
        if isinstance(table, dict) and "weight" in table
    }


def _slo(class_name: str, values: object) -> Slo:
    path = f"slo_classes.{class_name}"
    slo = _section(Slo, path, {**_table(path, values), "class_name": class_name})
    for name in ("ttft_s", "tbt_s", "e2e_s"):
        value = getattr(slo, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{path}.{name} is {value!r}; it must be more than 0 and finite")
    return slo


def _section(cls: type[T], path: str, values: dict[str, Any]) -> T:
    hints = typing.get_type_hints(cls)
    if unknown := values.keys() - hints.keys():
        raise ConfigError(
            f"unknown field {path}.{min(unknown)}; there are {', '.join(sorted(hints))}"
        )
    return cls(**{k: _coerce(f"{path}.{k}", hints[k], v) for k, v in values.items()})


def _coerce(path: str, hint: Any, value: Any) -> Any:  # noqa: ANN401 - a field's type is known at run time
    wanted = next(t for t in (typing.get_args(hint) or (hint,)) if t is not type(None))
    try:
        if isinstance(value, bool | dict | list) or (wanted is int and isinstance(value, float)):
            raise ValueError
        return wanted(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} is {value!r}; it must be {wanted.__name__}") from error
