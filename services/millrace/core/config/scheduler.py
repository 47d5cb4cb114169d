"""The settings of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millrace.core.config.fields import Section, one_of, setting, within
from millrace.core.cost.rates import parse_rates
from millrace.core.errors import ConfigError


def _rates(value: Any) -> str | None:  # noqa: ANN401 - a check sees any field's value
    try:
        parse_rates(value) if value else None
    except (ConfigError, AttributeError):
        return "ARRIVALS:RATE,... with arrivals per second ascending and rates between 0 and 1"
    return None


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Section):
    policy: str = setting(
        "millrace",
        one_of("fcfs", "edf", "d_edf", "s_edf", "lrs", "lars", "lars_deadline", "millrace"),
        "order of requests",
    )
    planner: str = setting(
        "auto",
        one_of("auto", "least_queue", "fixed_sp", "single_chunk", "esp", "cdsp"),
        "placement of prefill work. auto: cdsp if times of SP groups are known, else least_queue",
    )
    preemption: str = setting(
        "operator",
        one_of("none", "chunk", "layer", "operator"),
        "where a running prefill yields to a prefill that precedes it",
    )
    batch_tokens: int = setting(
        -1,
        within(-1),
        "most tokens of prompts that are computed together; 0: one prompt at a time; -1: as many "
        "tokens as fill the device, 2048 at most",
    )
    fixed_sp: int = setting(8, within(1, 1024), "SP degree of the planner fixed_sp")
    max_kv_tokens_per_worker: int = setting(
        0,
        within(0),
        "most tokens of one request at one decode instance or KVP worker, in whole pages, unless "
        "the request would fit nowhere then; 0: only requests that fit no instance are spread",
    )
    max_kvp_degree: int = setting(
        0, within(0, 4096), "most instances over which one request's KV is spread; 0: any number"
    )
    decode_reserve: str = setting(
        "whole",
        one_of("whole", "grow"),
        "pages reserved at decode. whole: for all tokens that a request may have; grow: for its "
        "prompt and decode_headroom_tokens, and instances preempt answers when pages run out",
    )
    decode_headroom_tokens: int = setting(256, within(1), "see decode_reserve")
    improvement_rate: float = setting(
        -1.0,
        within(-1, 1),
        "share by which a larger SP group must cut the TTFT; below 0: by load, and any "
        "gain is enough where it keeps a request's objective",
    )
    improvement_rates: str = setting(
        "",
        _rates,
        "improvement rate by arrivals, from `sim profile-rates`: ARRIVALS_PER_S:RATE,...; empty: "
        "by the seconds of prefill that arrive per second and instance",
    )
    max_queue_requests: int = setting(
        1024,
        within(1),
        "queued requests; more get 429. Up to twice as many if they would be in time",
    )
    max_queue_s: float = setting(
        600.0,
        within(0.1),
        "predicted seconds of queued work per prefill instance; more get 429. Up to twice as "
        "much if they would be in time",
    )
    tasks_ahead: int = setting(
        2, within(1, 64), "requests at one instance, the running request included"
    )
    max_attempts: int = setting(
        3,
        within(1, 100),
        "prefills of one request, without prefills that left decode more KV to resume from, or "
        "ended with a lost instance",
    )
    max_deaths: int = setting(
        3,
        within(1, 16),
        "instances that may die while a request is open there; then it runs alone, and the next "
        "death quarantines it. A request that was alone at the last of them is quarantined at once",
    )
    isolation_s: float = setting(
        10.0,
        within(0),
        "time of decoding: alone, it clears a request of the deaths; "
        "of a probe, it closes the breaker",
    )
    breaker_errors: int = setting(
        3,
        within(0, 100),
        "requests in a row that fail at an instance; then it gets no new request for a pause, and "
        "after it one request as a probe. 0: never",
    )
    breaker_pause_s: float = setting(
        2.0,
        within(0.1),
        "the first of these pauses; each later one is twice as long, up to 32 times",
    )
    slow_factor: float = setting(
        3.0,
        within(0, 100),
        "a prefill instance whose chunks take so many times as long as its pool expects gets no "
        "new prompt for breaker_pause_s, and after it one as a probe. 0: never",
    )
    heartbeat_s: float = setting(1.0, within(0.01), "interval of the workers' heartbeats")
    lease_s: float = setting(
        5.0,
        within(0.05),
        "silence after which a peer counts as dead; 6 s at most if its process is stopped or its "
        "network is gone (gRPC's keepalive)",
    )
    request_timeout_s: float = setting(
        3600.0, within(1), "longest time from arrival to the last token"
    )
    release_timeout_s: float = setting(
        120.0, within(1), "time for a worker to free the pages of a cancelled request"
    )
    group: str = setting(
        "", None, "schedulers of one group share a lease; fleets with the same store need several"
    )
    leader_lease_s: float = setting(
        1.5, within(0.2), "how long a leader that falls silent keeps other schedulers from leading"
    )
    takeover_wait_s: float = setting(
        1.0, within(0), "how long a new leader waits for the former leader's peers"
    )
