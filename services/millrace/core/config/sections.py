"""The sections of the configuration: every setting with its range and what it means.

Every message names the field by its dotted path, the value and the range. Units are in the names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millrace.core.arithmetic import ceil_div
from millrace.core.cost.rates import parse_rates
from millrace.core.errors import ConfigError


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
        "auto",
        _one_of("auto", "least_queue", "fixed_sp", "single_chunk", "esp", "cdsp"),
        "placement of prefill work. auto: cdsp where times of groups are known, else least_queue",
    )
    preemption: str = _setting(
        "operator",
        _one_of("none", "chunk", "layer", "operator"),
        "where a running prefill yields to one that goes before it",
    )
    batch_tokens: int = _setting(
        -1,
        _within(-1),
        "prompts are computed together up to this many tokens; 0: one by one; -1: as many as fill "
        "the device, 2048 at most",
    )
    fixed_sp: int = _setting(8, _within(1, 1024), "SP degree of the planner fixed_sp")
    max_kv_tokens_per_worker: int = _setting(
        0,
        _within(0),
        "tokens of one request at one decode instance or KVP worker at most, in whole pages; "
        "0: only what fits no instance is spread",
    )
    max_kvp_degree: int = _setting(
        0, _within(0, 4096), "instances that one request's KV is spread over at most; 0: any number"
    )
    decode_reserve: str = _setting(
        "whole",
        _one_of("whole", "grow"),
        "pages booked at decode. whole: of all tokens a request may come to; grow: of its prompt "
        "and decode_headroom_tokens, and instances preempt answers when pages run out",
    )
    decode_headroom_tokens: int = _setting(256, _within(1), "see decode_reserve")
    improvement_rate: float = _setting(
        -1.0, _within(-1, 1), "gain in TTFT that a larger group must bring; below 0: by the load"
    )
    improvement_rates: str = _setting(
        "",
        _rates,
        "the gain by arrivals, as `sim profile-rates` found it best: ARRIVALS_PER_S:RATE,...; "
        "empty: by the seconds of prefill that arrive a second and instance",
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


@dataclass(frozen=True, kw_only=True)
class EngineConfig(_Section):
    device: str = _setting("auto", None, "auto, cpu, cuda or cuda:N")
    dtype: str = _setting("auto", _one_of("auto", "float32", "bfloat16"), "auto: the model's own")
    threads: int = _setting(0, _within(0, 4096), "compute threads; 0: all cores of the process")
    tensor_parallel: int = _setting(
        1, _within(1, 64), "ranks of an instance, each with its share of heads and widths"
    )
    stages: int = _setting(
        1, _within(1, 64), "stages of an instance, each with a run of the model's layers"
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
    device_share: float = _setting(
        1.0, _within(0.01, 1.0), "of a GPU's memory, where instances share one; weights included"
    )
    max_context_tokens: int = _setting(0, _within(0), "0: the model's own")
    max_chunk_tokens: int = _setting(2048, _within(1), "tokens a forward pass computes at most")
    max_suspended: int = _setting(
        8,
        _within(1, 1024),
        "prefills suspended in the middle of a pass at most: each keeps its activations",
    )
    max_batch: int = _setting(64, _within(1, 4096), "sequences of a decode batch")
    prefix_cache: str = _setting(
        "on", _one_of("on", "off"), "KV of prompts and answers is kept for others that begin alike"
    )
    prefix_block_tokens: int = _setting(
        64,
        _within(1, 65536),
        "tokens of a cached block, rounded up to whole pages; alike fleet-wide",
    )
    swap_bytes: int = _setting(
        0,
        _within(0),
        "host memory for the KV of preempted answers; where it is full they are computed anew",
    )
    profile: str = _setting(
        "auto",
        _profile,
        "where prefill times come from. auto: what `millrace profile` left in the cache, else a "
        "brief fit at start; none: the brief fit",
    )
    profile_cache: str = _setting(
        "", None, "folder of measured profiles; empty: millrace/profiles in the user's cache folder"
    )

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the prefix cache: whole pages."""
        return ceil_div(self.prefix_block_tokens, self.page_tokens) * self.page_tokens


@dataclass(frozen=True, kw_only=True)
class MixedConfig(_Section):
    """Batches of `millrace colocated --role mixed` (Medha section 4.3)."""

    t_target_ms: float = _setting(
        50.0,
        _within(0.1, 1e6),
        "predicted time of an iteration at most, where no running answer has a TBT objective",
    )
    chunking: str = _setting(
        "adaptive",
        _one_of("adaptive", "static"),
        "adaptive: chunks shrink as their history grows; static: static_chunk_tokens an iteration",
    )
    static_chunk_tokens: int = _setting(512, _within(1), "tokens of a static iteration")
    min_chunk_tokens: int = _setting(32, _within(1))
    chunk_step_tokens: int = _setting(32, _within(1), "chunks are multiples of it")
    long_kv_tokens: int = _setting(
        262_144, _within(1), "history from which on a prefill is long: one a batch at most"
    )
    max_yield: float = _setting(
        0.4,
        _within(0.0, 0.99),
        "share of t_target that a long prefill yields to short ones",
    )
    multi_prefill: str = _setting(
        "on", _one_of("on", "off"), "chunks of several prompts share an iteration"
    )


@dataclass(frozen=True, kw_only=True)
class TransferConfig(_Section):
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
