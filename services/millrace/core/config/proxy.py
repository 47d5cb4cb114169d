"""The settings of the proxy."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.config.fields import Section, one_of, setting, within


@dataclass(frozen=True, kw_only=True)
class ProxyConfig(Section):
    host: str = setting("127.0.0.1")
    port: int = setting(8080, within(0, 65535), "0 picks a free port")
    workers: int = setting(1, within(1, 256), "processes that share the port")
    models_file: str = setting(
        "",
        None,
        "TOML file with tables `models.NAME`, in place of --model; the proxy reads it again when "
        "it changes",
    )
    max_body_bytes: int = setting(32 << 20, within(1024), "larger bodies get 413")
    max_choices: int = setting(16, within(1, 1024), "largest n of a request")
    max_logprobs: int = setting(20, within(0, 1024))
    tool_parser: str = setting(
        "auto",
        one_of(
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
    reasoning_parser: str = setting(
        "auto",
        one_of("auto", "none", "think", "mistral", "harmony"),
        "form of reasoning in a model's text. auto: by the chat template; none: it is content",
    )
    pooling: str = setting(
        "auto",
        one_of("auto", "last", "mean"),
        "hidden state that stands for a text: of its last token, or the mean over all its tokens. "
        "auto: by the model's sentence-transformers files, else last",
    )
    max_new_tokens: int = setting(
        4096, within(1), "largest max_tokens, and the default when none is given"
    )
    max_inflight: int = setting(4096, within(1), "requests open at once; more get 429")
    default_ttft_slo_ms: float = setting(
        0.0, within(0, 1e9), "TTFT objective if neither header nor class gives one; 0: none"
    )
    default_tbt_slo_ms: float = setting(
        0.0, within(0, 1e9), "TBT objective if neither header nor class gives one; 0: none"
    )
    default_e2e_slo_ms: float = setting(
        0.0, within(0, 1e9), "end-to-end objective if neither header nor class gives one; 0: none"
    )
    admin_token: str = setting(
        "", None, "bearer token of /admin; empty: clients on the proxy's own machine only"
    )
    keepalive_s: float = setting(
        10.0, within(0.01, 3600), "a stream that is silent for one to two of these gets a comment"
    )
    progress_interval_s: float = setting(
        1.0, within(0.01, 3600), "time between two progress events of a stream that shows them"
    )
    resume_grace_s: float = setting(
        60.0,
        within(0, 86400),
        "a resumable stream goes on this long without a client; 0: no stream is resumable",
    )
    request_timeout_s: float = setting(
        0.0, within(0, 86400), "longest time from arrival to the last token; 0: no limit here"
    )
    cors_origins: str = setting(
        "", None, "origins of web pages that may call the API, with commas between; *: all"
    )
    access_log: str = setting(
        "off", one_of("on", "off"), "a log record for every request, without its text"
    )
    submit_timeout_s: float = setting(
        10.0, within(0.01), "longest wait for the scheduler, and for instances that come back"
    )
    park_timeout_s: float = setting(
        0.0, within(0, 86400), "longest wait of a request for instances to start; 0: no wait"
    )
    max_parked: int = setting(1024, within(1), "requests that wait for instances; more get 429")
    drain_timeout_s: float = setting(30.0, within(0), "time for open requests at shutdown")
