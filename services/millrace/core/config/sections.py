"""The sections of the configuration: every setting with its range and its meaning.

Every message names the field by its dotted path, the value and the range. Units are in the names.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from millrace.core.arithmetic import ceil_div
from millrace.core.config.fields import Section as _Section
from millrace.core.config.fields import one_of as _one_of
from millrace.core.config.fields import setting as _setting
from millrace.core.config.fields import within as _within
from millrace.core.cost.rates import parse_rates
from millrace.core.errors import ConfigError


def _rates(value: Any) -> str | None:  # noqa: ANN401
    try:
        parse_rates(value) if value else None
    except (ConfigError, AttributeError):
        return "ARRIVALS:RATE,... with arrivals per second ascending and rates between 0 and 1"
    return None


def _batches(value: Any) -> str | None:  # noqa: ANN401
    sizes = str(value).split(",") if value else []
    if all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        return None
    return "numbers of sequences of at least 1, separated by commas"


def _profile(value: Any) -> str | None:  # noqa: ANN401
    known = isinstance(value, str) and (value in ("auto", "none") or value.endswith(".json"))
    return None if known else "auto, none or the path of a .json file"


@dataclass(frozen=True, kw_only=True)
class ProxyConfig(_Section):
    host: str = _setting("127.0.0.1")
    port: int = _setting(8080, _within(0, 65535), "0 picks a free port")
    workers: int = _setting(1, _within(1, 256), "processes that share the port")
    models_file: str = _setting(
        "",
        None,
        "TOML file with tables `models.NAME`, in place of --model; the proxy reads it again when "
        "it changes",
    )
    max_body_bytes: int = _setting(32 << 20, _within(1024), "larger bodies get 413")
    max_choices: int = _setting(16, _within(1, 1024), "largest n of a request")
    max_logprobs: int = _setting(20, _within(0, 1024))
    tool_parser: str = _setting(
        "auto",
        _one_of(
            "auto",
            "none",
            "hermes",
            "qwen3_coder",
            "llama3_json",
            "pythonic",
            "mistral",
            "deepseek",
            "harmony",
        ),
        "form of tool calls in a model's text. auto: by the chat template; none: tools are refused",
    )
    reasoning_parser: str = _setting(
        "auto",
        _one_of("auto", "none", "think", "mistral", "harmony"),
        "form of reasoning in a model's text. auto: by the chat template; none: it is content",
    )
    pooling: str = _setting(
        "auto",
        _one_of("auto", "last", "mean"),
        "hidden state that stands for a text: of its last token, or the mean over all its tokens. "
        "auto: by the model's sentence-transformers files, else last",
    )
    max_new_tokens: int = _setting(
        4096, _within(1), "largest max_tokens, and the default when none is given"
    )
    max_inflight: int = _setting(4096, _within(1), "requests open at once; more get 429")
    default_ttft_slo_ms: float = _setting(
        0.0, _within(0, 1e9), "TTFT objective if neither header nor class gives one; 0: none"
    )
    default_tbt_slo_ms: float = _setting(
        0.0, _within(0, 1e9), "TBT objective if neither header nor class gives one; 0: none"
    )
    default_e2e_slo_ms: float = _setting(
        0.0, _within(0, 1e9), "end-to-end objective if neither header nor class gives one; 0: none"
    )
    admin_token: str = _setting(
        "", None, "bearer token of /admin; empty: clients on the proxy's own machine only"
    )
    keepalive_s: float = _setting(
        10.0, _within(0.01, 3600), "a stream that is silent for one to two of these gets a comment"
    )
    progress_interval_s: float = _setting(
        1.0, _within(0.01, 3600), "time between two progress events of a stream that shows them"
    )
    resume_grace_s: float = _setting(
        60.0,
        _within(0, 86400),
        "a resumable stream goes on this long without a client; 0: no stream is resumable",
    )
    request_timeout_s: float = _setting(
        0.0, _within(0, 86400), "longest time from arrival to the last token; 0: no limit here"
    )
    cors_origins: str = _setting(
        "", None, "origins of web pages that may call the API, with commas between; *: all"
    )
    access_log: str = _setting(
        "off", _one_of("on", "off"), "a log record for every request, without its text"
    )
    submit_timeout_s: float = _setting(
        10.0, _within(0.01), "longest wait for the scheduler's answer to a submission"
    )
    park_timeout_s: float = _setting(
        0.0, _within(0, 86400), "longest wait of a request for instances to start; 0: no wait"
    )
    max_parked: int = _setting(1024, _within(1), "requests that wait for instances; more get 429")
    drain_timeout_s: float = _setting(30.0, _within(0), "time for open requests at shutdown")


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
        "placement of prefill work. auto: cdsp if times of SP groups are known, else least_queue",
    )
    preemption: str = _setting(
        "operator",
        _one_of("none", "chunk", "layer", "operator"),
        "where a running prefill yields to a prefill that precedes it",
    )
    batch_tokens: int = _setting(
        -1,
        _within(-1),
        "most tokens of prompts that are computed together; 0: one prompt at a time; -1: as many "
        "tokens as fill the device, 2048 at most",
    )
    fixed_sp: int = _setting(8, _within(1, 1024), "SP degree of the planner fixed_sp")
    max_kv_tokens_per_worker: int = _setting(
        0,
        _within(0),
        "most tokens of one request at one decode instance or KVP worker, in whole pages; "
        "0: only requests that fit no instance are spread",
    )
    max_kvp_degree: int = _setting(
        0, _within(0, 4096), "most instances over which one request's KV is spread; 0: any number"
    )
    decode_reserve: str = _setting(
        "whole",
        _one_of("whole", "grow"),
        "pages reserved at decode. whole: for all tokens that a request may have; grow: for its "
        "prompt and decode_headroom_tokens, and instances preempt answers when pages run out",
    )
    decode_headroom_tokens: int = _setting(256, _within(1), "see decode_reserve")
    improvement_rate: float = _setting(
        -1.0,
        _within(-1, 1),
        "share by which a larger SP group must cut the TTFT; below 0: by load, and any "
        "gain is enough where it keeps a request's objective",
    )
    improvement_rates: str = _setting(
        "",
        _rates,
        "improvement rate by arrivals, from `sim profile-rates`: ARRIVALS_PER_S:RATE,...; empty: "
        "by the seconds of prefill that arrive per second and instance",
    )
    max_queue_requests: int = _setting(1024, _within(1), "queued requests; more get 429")
    max_queue_s: float = _setting(
        600.0, _within(0.1), "predicted seconds of queued work per prefill instance; more get 429"
    )
    tasks_ahead: int = _setting(
        2, _within(1, 64), "requests at one instance, the running request included"
    )
    max_attempts: int = _setting(
        3,
        _within(1, 100),
        "prefills of one request, without prefills that left decode more KV to resume from",
    )
    heartbeat_s: float = _setting(1.0, _within(0.01), "interval of the workers' heartbeats")
    lease_s: float = _setting(5.0, _within(0.05), "silence after which a peer counts as dead")
    request_timeout_s: float = _setting(
        3600.0, _within(1), "longest time from arrival to the last token"
    )
    release_timeout_s: float = _setting(
        120.0, _within(1), "time for a worker to free the pages of a cancelled request"
    )
    group: str = _setting(
        "", None, "schedulers of one group share a lease; fleets with the same store need several"
    )
    leader_lease_s: float = _setting(
        1.5, _within(0.2), "how long a leader that falls silent keeps other schedulers from leading"
    )
    takeover_wait_s: float = _setting(
        1.0, _within(0), "how long a new leader waits for the former leader's peers"
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig(_Section):
    device: str = _setting("auto", None, "auto, cpu, cuda or cuda:N")
    dtype: str = _setting("auto", _one_of("auto", "float32", "bfloat16"), "auto: the model's own")
    threads: int = _setting(0, _within(0, 4096), "compute threads; 0: all cores of the process")
    tensor_parallel: int = _setting(
        1, _within(1, 64), "ranks of an instance, which share each layer's heads and widths"
    )
    kv_pools: str = _setting(
        "auto",
        _one_of("auto", "shared", "own"),
        "KV pools of an instance's ranks. shared: in one memory on the host; own: each rank has "
        "memory of its own; auto: shared on the host, own on GPUs",
    )
    stages: int = _setting(
        1, _within(1, 64), "pipeline stages of an instance, each with consecutive layers"
    )
    load_format: str = _setting(
        "auto", _one_of("auto", "dummy"), "dummy: random weights from config.json"
    )
    attention_backend: str = _setting(
        "auto",
        _one_of("auto", "cpu", "torch", "triton", "flashinfer", "reference"),
        "auto: the fastest that can run",
    )
    cuda_graphs: str = _setting(
        "auto",
        _one_of("auto", "on", "off"),
        "decode steps by CUDA graphs. auto: where possible; on: else the instance does not start",
    )
    cuda_graph_batches: str = _setting(
        "",
        _batches,
        "sizes of batches to capture, SEQUENCES,...; empty: powers of two and max_batch",
    )
    decode_ahead: str = _setting(
        "auto",
        _one_of("auto", "on", "off"),
        "a decode step begins before the host has the last step's tokens. auto: on GPUs",
    )
    page_tokens: int = _setting(16, _within(1, 1024), "tokens of a KV page")
    kv_bytes: int = _setting(0, _within(0), "memory of the KV pool; 0: a share of the free memory")
    device_share: float = _setting(
        1.0,
        _within(0.01, 1.0),
        "share of a GPU's memory, weights included, if instances share a GPU",
    )
    max_context_tokens: int = _setting(0, _within(0), "longest context; 0: the model's own")
    max_chunk_tokens: int = _setting(2048, _within(1), "most tokens of a forward pass")
    max_suspended: int = _setting(
        8,
        _within(1, 1024),
        "most prefills suspended in the middle of a pass: each keeps its activations",
    )
    max_batch: int = _setting(64, _within(1, 4096), "sequences of a decode batch")
    prefix_cache: str = _setting(
        "on",
        _one_of("on", "off"),
        "keep KV of prompts and answers for prompts with the same prefix",
    )
    prefix_block_tokens: int = _setting(
        64,
        _within(1, 65536),
        "tokens of a cached block, rounded up to whole pages; equal in the whole fleet",
    )
    swap_bytes: int = _setting(
        0,
        _within(0),
        "host memory for the KV of preempted answers; if it is full, they are computed again",
    )
    profile: str = _setting(
        "auto",
        _profile,
        "source of prefill times. auto: the profile that `millrace profile` wrote to the cache, or "
        "else a brief fit at start; none: the brief fit",
    )
    profile_cache: str = _setting(
        "", None, "folder of measured profiles; empty: millrace/profiles in the user's cache folder"
    )

    @property
    def block_tokens(self) -> int:
        """The tokens of a block of the prefix cache: whole pages."""
        return ceil_div(self.prefix_block_tokens, self.page_tokens) * self.page_tokens


@dataclass(frozen=True, kw_only=True)
class MixedConfig(_Section):
    """Batches of `millrace colocated --role mixed` (Medha section 4.3)."""

    t_target_ms: float = _setting(
        50.0,
        _within(0.1, 1e6),
        "longest predicted time of an iteration if no running answer has a TBT objective",
    )
    chunking: str = _setting(
        "adaptive",
        _one_of("adaptive", "static"),
        "adaptive: chunks shrink as their history grows; static: static_chunk_tokens per iteration",
    )
    static_chunk_tokens: int = _setting(512, _within(1), "tokens of a static iteration")
    min_chunk_tokens: int = _setting(32, _within(1), "smallest chunk, except a prompt's last")
    chunk_step_tokens: int = _setting(32, _within(1), "chunks are multiples of this")
    long_kv_tokens: int = _setting(
        262_144,
        _within(1),
        "history from which a prefill is long: a batch has at most one long prefill",
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
        4, _within(1, 1024), "requests that may transfer to one decode instance at the same time"
    )
    buffer_bytes: int = _setting(
        0, _within(0), "staging buffer per backend; 0: no buffer, writes go to the pages directly"
    )
    handshake_timeout_s: float = _setting(30.0, _within(0.01), "longest wait for a handshake")
    transfer_timeout_s: float = _setting(60.0, _within(0.01), "longest time without progress")
    lease_s: float = _setting(
        30.0, _within(0.05), "lifetime of a reservation without a message from its sender"
    )
    kv_checksum: str = _setting(
        "off",
        _one_of("on", "off"),
        "on: KV that arrives here must come with a crc32c, which is checked in the pages",
    )


@dataclass(frozen=True, kw_only=True)
class StoreConfig(_Section):
    url: str = _setting(
        "memory://", None, "redis://, rediss:// or unix:// URL; memory:// within one process only"
    )
    key_prefix: str = _setting("millrace")
    ttl_s: float = _setting(7200.0, _within(1), "lifetime of a record whose request has not ended")
    finished_ttl_s: float = _setting(
        60.0, _within(0), "lifetime of a record after its request has ended"
    )
    journal_interval_ms: float = _setting(100.0, _within(1))
    responses_ttl_s: float = _setting(
        86400.0, _within(1), "lifetime of a response of /v1/responses, from its creation"
    )


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig(_Section):
    log_level: str = _setting("info", _one_of("debug", "info", "warning", "error"))
    log_format: str = _setting("text", _one_of("text", "json"))
    otlp_endpoint: str = _setting(
        "",
        None,
        "host:port or URL of an OTLP/gRPC collector, which gets the spans of all processes",
    )
    trace_folder: str = _setting(
        "", None, "folder to which each process writes its spans: OTLP in lines of JSON"
    )
    trace_ratio: float = _setting(
        0.05, _within(0, 1), "share of traces that are sampled, unless a traceparent decides"
    )
    trace_tail_spans: int = _setting(
        16384,
        _within(0),
        "most spans of other traces that a process holds: slow and failed requests are traced, "
        "too; 0: not",
    )
    vllm_names: str = _setting(
        "off", _one_of("off", "on"), "metrics also under vLLM's names, for its dashboards"
    )
    metrics_port: int = _setting(
        0, _within(0, 65535), "/metrics, /health and /ready of a worker or scheduler; 0: off"
    )


@dataclass(frozen=True, kw_only=True)
class TlsConfig(_Section):
    """PEM files, read again after changes. Set all, or none for connections without encryption."""

    ca_file: str = _setting(
        "", None, "CA certificates that sign the peers' certificates; all three empty: no TLS"
    )
    cert_file: str = _setting(
        "", None, "this process's certificate, followed by intermediate certificates"
    )
    key_file: str = _setting("", None, "private key of cert_file")

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
    """Settings of `millrace up --autoscale`."""

    interval_s: float = _setting(2.0, _within(0.05), "time between two decisions")
    up_step: int = _setting(2, _within(1), "most instances that a pool gains within up_period_s")
    up_period_s: float = _setting(15.0, _within(0), "period of up_step")
    down_window_s: float = _setting(30.0, _within(0), "time of less load before a pool shrinks")
    down_step: int = _setting(
        1, _within(1), "most instances that a pool loses within down_period_s"
    )
    down_period_s: float = _setting(15.0, _within(0), "period of down_step")
    idle_s: float = _setting(
        120.0, _within(0), "time without requests before a pool goes to zero, if it may"
    )
    drain_timeout_s: float = _setting(
        60.0, _within(0), "time for an instance's requests; then they are migrated"
    )
