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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from millrace.core.errors import ConfigError
from millrace.core.improvement_rate import parse_rates
from millrace.core.request import Slo

T = TypeVar("T")


def _within(low: float, high: float = math.inf) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:  # noqa: ANN401 - a check sees any field's value
        if low <= value <= high:
            return None
        return f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"

    return check


def _one_of(*choices: str) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:  # noqa: ANN401
        return None if value in choices else "one of " + ", ".join(choices)

    return check


def _rates(value: Any) -> str | None:  # noqa: ANN401
    try:
        parse_rates(value) if value else None
    except (ConfigError, AttributeError):
        return "ARRIVALS:RATE,... with arrivals per second ascending and rates between 0 and 1"
    return None


def _profile(value: Any) -> str | None:  # noqa: ANN401
    known = isinstance(value, str) and (value in ("auto", "none") or value.endswith(".json"))
    return None if known else "auto, none or the path of a .json file"


def _setting(default: Any, check: Callable[[Any], str | None] | None = None, doc: str = "") -> Any:  # noqa: ANN401
    return field(default=default, metadata={"check": check, "doc": doc})


class _Section:
    """Checks every field of a section against its range when it is built."""

    def __post_init__(self) -> None:
        section = type(self).__name__.removesuffix("Config").lower()
        for f in dataclasses.fields(self):  # type: ignore[arg-type]  # every section is a dataclass
            check = f.metadata.get("check")
            value = getattr(self, f.name)
            if check is not None and (wanted := check(value)) is not None:
                raise ConfigError(f"{section}.{f.name} is {value!r}; it must be {wanted}")


@dataclass(frozen=True, kw_only=True)
class ProxyConfig(_Section):
    host: str = _setting("127.0.0.1")
    port: int = _setting(8080, _within(0, 65535), "0 picks a free port")
    workers: int = _setting(1, _within(1, 256), "processes that share the port")
    max_body_bytes: int = _setting(32 << 20, _within(1024), "larger bodies get 413")
    max_choices: int = _setting(16, _within(1, 1024), "largest n of a request")
    max_logprobs: int = _setting(20, _within(0, 1024))
    max_new_tokens: int = _setting(
        4096, _within(1), "largest max_tokens, and the default when none is given"
    )
    max_inflight: int = _setting(4096, _within(1), "requests open at once; more get 429")
    default_ttft_slo_ms: float = _setting(
        0.0, _within(0, 1e9), "objective where neither header nor class has one; 0: none"
    )
    default_tbt_slo_ms: float = _setting(0.0, _within(0, 1e9), "likewise")
    admin_token: str = _setting(
        "", None, "bearer token of /admin; empty: clients on the proxy's own machine only"
    )
    submit_timeout_s: float = _setting(
        10.0, _within(0.01), "for the scheduler's answer to a submission"
    )
    park_timeout_s: float = _setting(
        0.0, _within(0, 86400), "a request waits this long for instances to start; 0: none waits"
    )
    max_parked: int = _setting(1024, _within(1), "requests that wait so; more get 429")
    drain_timeout_s: float = _setting(30.0, _within(0))


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(_Section):
    policy: str = _setting(
        "millrace",
        _one_of("fcfs", "edf", "d_edf", "s_edf", "lrs", "lars", "lars_deadline", "millrace"),
        "order of requests",
    )
    planner: str = _setting(
        "least_queue",
        _one_of("least_queue", "fixed_sp", "single_chunk", "esp", "cdsp"),
        "placement of prefill work",
    )
    preemption: str = _setting(
        "operator",
        _one_of("none", "chunk", "layer", "operator"),
        "where a running prefill yields to one that goes before it",
    )
    batch_tokens: int = _setting(
        0, _within(0), "prompts are computed together up to this many tokens; 0: one by one"
    )
    fixed_sp: int = _setting(8, _within(1, 1024), "SP degree of the planner fixed_sp")
    improvement_rate: float = _setting(
        0.3, _within(-1, 1), "gain in TTFT that a larger group must bring; below 0: by arrival rate"
    )
    improvement_rates: str = _setting(
        "", _rates, "what `sim profile-rates` found best: ARRIVALS_PER_S:RATE,..."
    )
    max_queue_requests: int = _setting(1024, _within(1), "queued requests; more get 429")
    max_queue_s: float = _setting(
        600.0, _within(0.1), "predicted seconds of queued work a prefill instance"
    )
    tasks_ahead: int = _setting(
        2, _within(1, 64), "requests an instance holds, the running one included"
    )
    max_attempts: int = _setting(
        3,
        _within(1, 100),
        "prefills of one request, but for those that left decode more to go on from",
    )
    heartbeat_s: float = _setting(1.0, _within(0.01))
    lease_s: float = _setting(5.0, _within(0.05), "silence of a peer that counts as its death")
    request_timeout_s: float = _setting(3600.0, _within(1), "from arrival to the last token")
    release_timeout_s: float = _setting(
        120.0, _within(1), "for a worker to free the pages of a request that it was told to drop"
    )
    drain_timeout_s: float = _setting(
        30.0, _within(0), "at shutdown, for running requests to finish"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.improvement_rate < 0.0 and not self.improvement_rates:
            raise ConfigError(
                f"scheduler.improvement_rate is {self.improvement_rate:g}, by arrival rate; then "
                "scheduler.improvement_rates must hold what `millrace sim profile-rates` found"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig(_Section):
    device: str = _setting("auto", None, "auto, cpu, cuda or cuda:N")
    dtype: str = _setting("auto", _one_of("auto", "float32", "bfloat16"), "auto: the model's own")
    threads: int = _setting(0, _within(0, 4096), "compute threads; 0: all cores of the process")
    tensor_parallel: int = _setting(
        1, _within(1, 64), "ranks of an instance, each with its share of heads and widths"
    )
    load_format: str = _setting(
        "auto", _one_of("auto", "dummy"), "dummy: random weights from config.json"
    )
    attention_backend: str = _setting(
        "auto",
        _one_of("auto", "cpu", "torch", "triton", "flashinfer", "reference"),
        "auto: the fastest that can run",
    )
    page_tokens: int = _setting(16, _within(1, 1024))
    kv_bytes: int = _setting(0, _within(0), "memory of the KV pool; 0: a share of what is free")
    max_context_tokens: int = _setting(0, _within(0), "0: the model's own")
    max_chunk_tokens: int = _setting(2048, _within(1), "tokens a forward pass computes at most")
    max_suspended: int = _setting(
        8,
        _within(1, 1024),
        "prefills suspended in the middle of a pass at most: each keeps its activations",
    )
    max_batch: int = _setting(64, _within(1, 4096), "sequences of a decode batch")
    profile: str = _setting(
        "auto",
        _profile,
        "where prefill times come from. auto: what `millrace profile` left in the cache, else a "
        "brief fit at start; none: the brief fit",
    )
    profile_cache: str = _setting(
        "", None, "folder of measured profiles; empty: millrace/profiles in the user's cache folder"
    )


@dataclass(frozen=True, kw_only=True)
class TransferConfig(_Section):
    transport: str = _setting("nixl", _one_of("nixl", "memory"))
    backends: int = _setting(
        4, _within(1, 1024), "requests that may transfer to one decode instance at once"
    )
    buffer_bytes: int = _setting(
        0, _within(0), "staging buffer a backend; 0: buffer-free, into the pages themselves"
    )
    handshake_timeout_s: float = _setting(30.0, _within(0.01))
    transfer_timeout_s: float = _setting(60.0, _within(0.01), "without progress")
    lease_s: float = _setting(
        30.0, _within(0.05), "life of a reservation without news from its sender"
    )


@dataclass(frozen=True, kw_only=True)
class StoreConfig(_Section):
    url: str = _setting(
        "memory://", None, "redis://, rediss:// or unix:// URL; memory:// inside one process only"
    )
    key_prefix: str = _setting("millrace")
    ttl_s: float = _setting(7200.0, _within(1), "life of a record nobody finished")
    finished_ttl_s: float = _setting(60.0, _within(0), "life of a record after its request ended")
    journal_interval_ms: float = _setting(100.0, _within(1))


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig(_Section):
    log_level: str = _setting("info", _one_of("debug", "info", "warning", "error"))
    log_format: str = _setting("text", _one_of("text", "json"))
    otlp_endpoint: str = _setting("", None, "empty: traces stay in the process")
    metrics_port: int = _setting(
        0, _within(0, 65535), "/metrics, /health and /ready of a worker or scheduler; 0: off"
    )


@dataclass(frozen=True, kw_only=True)
class TlsConfig(_Section):
    """PEM files, read again when they change. All are given, or none: then nothing is encrypted."""

    ca_file: str = _setting(
        "", None, "certificates that peers' are signed by; empty, as all three: no TLS"
    )
    cert_file: str = _setting(
        "", None, "this process's certificate, with those between it and the CA's"
    )
    key_file: str = _setting("", None, "its private key")

    def __post_init__(self) -> None:
        super().__post_init__()
        files = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        missing = [name for name, path in files.items() if not path]
        if 0 < len(missing) < len(files):
            given = next(name for name in files if name not in missing)
            raise ConfigError(
                f"tls.{missing[0]} is ''; it must be the path of a file, as tls.{given} is "
                f"{files[given]!r}: all three are given or none"
            )

    @property
    def enabled(self) -> bool:
        return bool(self.ca_file)


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(_Section):
    """Of `millrace up --autoscale`."""

    interval_s: float = _setting(2.0, _within(0.05), "between two decisions")
    up_step: int = _setting(2, _within(1), "instances that up_period_s adds to a pool at most")
    up_period_s: float = _setting(15.0, _within(0))
    down_window_s: float = _setting(30.0, _within(0), "of less load, before a pool shrinks")
    down_step: int = _setting(1, _within(1), "instances that down_period_s takes at most")
    down_period_s: float = _setting(15.0, _within(0))
    idle_s: float = _setting(
        120.0, _within(0), "without a request, before a pool that may goes to zero"
    )
    drain_timeout_s: float = _setting(
        60.0, _within(0), "then what an instance still holds goes on elsewhere"
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole tree. `slo_classes` maps a class name (`x-millrace-class`) to its objectives."""

    proxy: ProxyConfig = ProxyConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    store: StoreConfig = StoreConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    tls: TlsConfig = TlsConfig()
    scaling: ScalingConfig = ScalingConfig()
    slo_classes: Mapping[str, Slo] = field(default_factory=lambda: types.MappingProxyType({}))

    def __post_init__(self) -> None:
        if self.scheduler.lease_s < 2 * self.scheduler.heartbeat_s:
            raise ConfigError(
                f"scheduler.lease_s is {self.scheduler.lease_s:g}; it must be at least twice "
                f"scheduler.heartbeat_s ({self.scheduler.heartbeat_s:g})"
            )


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Builds the tree from a TOML file and `section.field=value` overrides, in that order.

    Raises ConfigError for an unknown section or field, a value of the wrong type or out of range.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # not to be read, not UTF-8, not TOML
            raise ConfigError(f"config file {path}: {error}") from error
    for override in overrides:
        name, separator, text = override.partition("=")
        section, dot, key = name.partition(".")
        if not (separator and dot):
            raise ConfigError(f"--set {override!r}: write it as section.field=value")
        _table(section, tree.setdefault(section, {}))[key] = text
    return _build(tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of the tree, as people read about it."""

    section: str
    name: str
    default: Any
    range: str
    doc: str


def settings() -> Iterator[Setting]:
    """Every field of every section, in the order of the tree."""
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
    if unknown := tree.keys() - sections.keys():
        raise ConfigError(
            f"unknown section {min(unknown)!r}; there are {', '.join(sorted(sections))}"
        )
    built: dict[str, Any] = {}
    for name, values in tree.items():
        table = _table(name, values)
        if name == "slo_classes":
            built[name] = {cls: _slo(cls, given) for cls, given in table.items()}
        else:
            built[name] = _section(sections[name], name, table)
    return Config(**built)


def _table(path: str, value: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever a file holds
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is {value!r}; it must be a table")
    return value


def _slo(class_name: str, values: object) -> Slo:
    path = f"slo_classes.{class_name}"
    slo = _section(Slo, path, {**_table(path, values), "class_name": class_name})
    for name in ("ttft_s", "tbt_s"):
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
