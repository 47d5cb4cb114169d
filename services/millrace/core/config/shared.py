"""The settings of what several services use: the store, telemetry, TLS, scaling."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from millrace.core.config.fields import Section, one_of, setting, within
from millrace.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StoreConfig(Section):
    url: str = setting(
        "memory://",
        None,
        "redis://, rediss:// or unix:// URL, with Sentinels redis+sentinel:// or "
        "rediss+sentinel://, of a cluster redis+cluster:// or rediss+cluster://; memory:// within "
        "one process only",
    )
    key_prefix: str = setting("millrace")
    timeout_s: float = setting(
        2.0,
        within(0.05),
        "how long the store may be silent; then it counts as out of reach: new requests get 503",
    )
    ttl_s: float = setting(
        7200.0,
        within(1),
        "lifetime of the request of a resumable stream that has not ended; others live for a "
        "minute, 60 s, after their proxy's last sign, or ttl_s if it is less",
    )
    finished_ttl_s: float = setting(
        60.0, within(0), "lifetime of a record after its request has ended"
    )
    journal_interval_ms: float = setting(100.0, within(1))
    responses_ttl_s: float = setting(
        86400.0, within(1), "lifetime of a response or a conversation, from its creation"
    )


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig(Section):
    log_level: str = setting("info", one_of("debug", "info", "warning", "error"))
    log_format: str = setting("text", one_of("text", "json"))
    otlp_endpoint: str = setting(
        "",
        None,
        "host:port or URL of an OTLP/gRPC collector, which gets the spans of all processes",
    )
    otlp_logs: str = setting(
        "off", one_of("off", "on"), "log records go to the collector, too, besides stderr"
    )
    otlp_metrics_s: float = setting(
        0.0,
        within(0),
        "s between two exports of all metrics to the collector; 0: /metrics alone has them",
    )
    trace_folder: str = setting(
        "", None, "folder to which each process writes its spans: OTLP in lines of JSON"
    )
    trace_ratio: float = setting(
        0.05, within(0, 1), "share of traces that are sampled, unless a traceparent decides"
    )
    trace_tail_spans: int = setting(
        16384,
        within(0),
        "most spans of other traces that a process holds: slow and failed requests are traced, "
        "too; 0: not",
    )
    waterfall_bytes: int = setting(
        4 << 20,
        within(0),
        "memory of each proxy process for the waterfalls of the last requests; 0: keeps none, "
        "and shares none in Redis",
    )
    report_requests: int = setting(
        100_000,
        within(0, 10_000_000),
        "ended requests whose outcomes Redis keeps for `millrace report`; 0: none",
    )
    vllm_names: str = setting(
        "off", one_of("off", "on"), "metrics also under vLLM's names, for its dashboards"
    )
    metrics_port: int = setting(
        0, within(0, 65535), "/metrics, /health and /ready of a worker or scheduler; 0: off"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = {"otlp_logs": self.otlp_logs == "on", "otlp_metrics_s": self.otlp_metrics_s > 0}
        for name, is_on in wanted.items():
            if is_on and not self.otlp_endpoint:
                raise ConfigError(
                    f"telemetry.{name} is {getattr(self, name)!r} and telemetry.otlp_endpoint ''; "
                    "name the collector"
                )


@dataclass(frozen=True, kw_only=True)
class TlsConfig(Section):
    """PEM files, read again after changes. Set all, or none for connections without encryption."""

    ca_file: str = setting(
        "", None, "CA certificates that sign the peers' certificates; all three empty: no TLS"
    )
    cert_file: str = setting(
        "", None, "this process's certificate, followed by intermediate certificates"
    )
    key_file: str = setting("", None, "private key of cert_file")

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
class ScalingConfig(Section):
    """Settings of `millrace up --autoscale`."""

    interval_s: float = setting(2.0, within(0.05), "time between two decisions")
    up_step: int = setting(2, within(1), "most instances that a pool gains within up_period_s")
    up_period_s: float = setting(15.0, within(0), "period of up_step")
    down_window_s: float = setting(30.0, within(0), "time of less load before a pool shrinks")
    down_step: int = setting(1, within(1), "most instances that a pool loses within down_period_s")
    down_period_s: float = setting(15.0, within(0), "period of down_step")
    idle_s: float = setting(
        120.0, within(0), "time without requests before a pool goes to zero, if it may"
    )
    drain_timeout_s: float = setting(
        60.0, within(0), "time for an instance's requests; then they are migrated"
    )
