"""Writes config.toml of a ModelService: the settings that its spec gives to all services."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from millrace.core.config import Config, load_config
from millrace.core.config.tenants import check_tenants, read_tenants
from millrace.core.errors import ConfigError
from millrace_operator.schema.gateway import FileStore
from millrace_operator.schema.pools import Kvp
from millrace_operator.schema.service import ModelServiceSpec, Scheduling, SloClass, Tenant
from millrace_operator.spec import SpecError

METRICS_PORT = 9090
FOLDER = "/etc/millrace"
#: The mount of the volume with the bytes of files.
FILES = "/files"
#: The value of files.url with which a proxy refuses files.
NO_FILES = "none"
KEYS_FOLDER, KEYS_FILE = "/etc/millrace-keys", "keys.toml"

#: Seconds within which a gateway pod's open streams end, or continue at another pod.
GATEWAY_DRAIN_S = 600

#: Settings that the operator itself sets; another value would break the pods that it builds.
_OWN = {
    "store.url": "spec.redis",
    "proxy.admin_token": "spec.gateway.adminTokenSecretRef",
    "files.url": "spec.gateway.files",
    "auth.require_key": "spec.gateway.keys.required",
    "auth.keys_file": "spec.gateway.keys.secretRef",
    "proxy.host": "the operator",
    "proxy.port": "the operator",
    "telemetry.metrics_port": "the operator",
    "engine.tensor_parallel": "spec.prefill.tensorParallel and spec.decode.tensorParallel",
    "engine.stage_hosts": "spec.prefill.stagePods and spec.decode.stagePods",
    "tls.ca_file": "spec.tls",
    "tls.cert_file": "spec.tls",
    "tls.key_file": "spec.tls",
}

#: The sections that one kind of worker reads, besides the sections that all workers read.
_READ_BESIDES: dict[str, tuple[str, ...]] = {
    "prefill": (),
    "decode": ("scheduler.decode_reserve", "scheduler.decode_headroom_tokens"),
    "mixed": ("mixed",),
    "kvp": (),
}

#: Sections, or fields of them, that a role reads at its start. Others may change while it runs.
_READ = {
    "proxy": {
        *("proxy", "auth", "files", "batches"),
        *("slo_classes", "tenants", "store", "telemetry", "tls"),
        *("engine.prefix_cache", "engine.prefix_block_tokens", "engine.page_tokens"),
    },
    "scheduler": {"scheduler", "store", "telemetry", "tls"},
    **{
        role: {"engine", "transfer", "store", "telemetry", "tls", "scheduler.lease_s", *more}
        for role, more in _READ_BESIDES.items()
    },
}

#: Sections of tables of their own, and the lists that set them.
_SETTERS = {"slo_classes": "spec.sloClasses", "tenants": "spec.tenants"}

Table = dict[str, Any]
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def tables(spec: ModelServiceSpec) -> dict[str, Table]:
    """Returns the sections of the file. Raises SpecError; `config` also finds values that
    `millrace` would refuse.
    """
    found: dict[str, Table] = {
        "proxy": _proxy(spec),
        "scheduler": _scheduler(spec.scheduling) | _spreading(spec.kvp),
        "telemetry": {"metrics_port": METRICS_PORT, "log_format": "json"},
        "files": {"url": _files_url(spec.gateway.files)},
    }
    if limit := spec.model.max_context_tokens:
        found["engine"] = {"max_context_tokens": limit}
    _check_keys(spec)
    if (keys := spec.gateway.keys) is not None:
        found["auth"] = {"require_key": "on" if keys.required else "off"}
        if keys.secret_ref is not None:
            found["auth"]["keys_file"] = f"{KEYS_FOLDER}/{KEYS_FILE}"
    if spec.tls is not None:
        files = {"ca_file": "ca.crt", "cert_file": "tls.crt", "key_file": "tls.key"}
        found["tls"] = {name: f"{FOLDER}/tls/{file}" for name, file in files.items()}
    for path, value in (spec.settings or {}).items():
        section, dot, name = path.partition(".")
        setter = _SETTERS.get(section) or _OWN.get(path)
        if setter is not None:
            raise SpecError(f"spec.settings[{path}] is {value!r}; {setter} sets it")
        if not dot:
            raise SpecError(f"spec.settings[{path}]: write it as section.field")
        found.setdefault(section, {})[name] = value
    if spec.slo_classes:
        found["slo_classes"] = {entry.name: _class(entry) for entry in spec.slo_classes}
    if spec.tenants:
        found["tenants"] = _tenants(spec.tenants, found.get("slo_classes", {}))
    return found


def config(given: Mapping[str, Table]) -> Config:
    """Returns the sections as the services will read them. Raises SpecError."""
    overrides = tuple(
        f"{section}.{name}={value}"
        for section, table in given.items()
        if section not in _SETTERS
        for name, value in table.items()
    )
    try:
        return _loaded(overrides)
    except ConfigError as error:
        raise SpecError(f"spec.settings: {error}") from error


@lru_cache(maxsize=64)  # cached: the longest part of a pass by far, and equal in the next pass
def _loaded(overrides: tuple[str, ...]) -> Config:
    return load_config(overrides=overrides)


def text(given: Mapping[str, Table]) -> str:
    """Returns the file's text."""
    blocks = []
    for section, table in given.items():
        nested = {k: v for k, v in table.items() if isinstance(v, dict)}
        plain = {k: v for k, v in table.items() if k not in nested}
        if plain:
            blocks.append(_block(_key(section), plain))
        blocks += [_block(f"{_key(section)}.{_key(k)}", v) for k, v in nested.items()]
    return "\n".join(blocks)


def digest_for(role: str, given: Mapping[str, Table]) -> str:
    """Returns a hash of the settings that a role reads: when it changes, the role's processes must
    restart.
    """
    read = _READ[role]
    seen = {
        f"{section}.{name}": value
        for section, table in given.items()
        for name, value in table.items()
        if section in read or f"{section}.{name}" in read
    }
    if role == "scheduler":  # it reads the names and the weights alone
        seen |= {
            f"{section}.{name}": table.get("weight")
            for section in _SETTERS
            for name, table in given.get(section, {}).items()
        }
    return digest(seen)


def digest(value: object) -> str:
    """Returns a short hash of plain data, independent of the order of mappings."""
    return hashlib.sha256(_CANONICAL.encode(value).encode()).hexdigest()[:10]


def _check_keys(spec: ModelServiceSpec) -> None:
    """Raises SpecError if every request would need a key, and nobody could have one."""
    keys, settings = spec.gateway.keys, spec.settings or {}
    if keys is None or not keys.required or keys.secret_ref is not None or spec.tenants:
        return
    if settings.get("auth.stored_keys", "off") != "on":
        raise SpecError(
            "spec.gateway.keys.required is true, but nobody has a key: give keys.secretRef, "
            "spec.tenants, or the setting auth.stored_keys: on"
        )


def _proxy(spec: ModelServiceSpec) -> Table:
    slo, parking = spec.slo, spec.gateway.parking
    e2e = {} if slo.e2e_seconds is None else {"default_e2e_slo_ms": 1000 * float(slo.e2e_seconds)}
    return {
        "default_ttft_slo_ms": 1000 * float(slo.ttft_seconds),
        "default_tbt_slo_ms": slo.tbt_milliseconds,
        **e2e,
        "park_timeout_s": parking.timeout_seconds,
        "max_parked": parking.max_requests,
        "drain_timeout_s": GATEWAY_DRAIN_S,
    }


def _files_url(files: FileStore | None) -> str:
    if files is None:
        return NO_FILES
    return FILES if files.claim_name is not None else files.url or NO_FILES


def _scheduler(scheduling: Scheduling) -> Table:
    return {
        "policy": scheduling.policy,
        "preemption": scheduling.preemption,
        "planner": scheduling.planner,
        "fixed_sp": scheduling.max_sp_degree,
    }


def _spreading(kvp: Kvp | None) -> Table:
    """Sets the most instances per request: the decode instance that owns the KV holds a part of it,
    too.
    """
    if kvp is None:
        return {}
    return {
        "max_kv_tokens_per_worker": kvp.tokens_per_worker,
        "max_kvp_degree": kvp.max_workers_per_request + 1,
    }


def _class(entry: SloClass) -> Table:
    objectives: Table = {}
    for name, field, seconds in (
        ("ttft_s", "ttftSeconds", entry.ttft_seconds),
        ("e2e_s", "e2eSeconds", entry.e2e_seconds),
    ):
        if seconds is not None:
            objectives[name] = float(seconds)
            if not objectives[name]:
                path = f"spec.sloClasses[{entry.name}].{field}"
                raise SpecError(f"{path} is {seconds!r}; it must be more than 0")
    if entry.tbt_milliseconds is not None:
        objectives["tbt_s"] = entry.tbt_milliseconds / 1000
    if entry.weight is not None:
        objectives["weight"] = entry.weight
    return objectives


def _tenants(entries: Iterable[Tenant], classes: Iterable[str]) -> Table:
    found: Table = {}
    for entry in entries:
        limits = {} if entry.limits is None else entry.limits.model_dump(exclude_none=True)
        found[entry.name] = {"key_sha256": list(entry.key_sha256), **limits}
        for name in ("weight", "models", "slo_classes"):
            value = getattr(entry, name)
            if value is not None:
                found[entry.name][name] = list(value) if isinstance(value, tuple) else value
    try:
        check_tenants(read_tenants(found), list(classes))
    except ConfigError as error:
        raise SpecError(f"spec.{error}") from error
    return found


def _block(name: str, table: Table) -> str:
    lines = "".join(f"{_key(k)} = {_value(v)}\n" for k, v in table.items())
    return f"[{name}]\n{lines}"


def _value(value: str | int | float | list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_quoted, value))}]"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _key(name: str) -> str:
    return name if name.isascii() and name.replace("_", "").isalnum() else _quoted(name)


def _quoted(value: str) -> str:
    """Quotes a basic string: TOML's escapes are JSON's, but TOML also escapes DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
