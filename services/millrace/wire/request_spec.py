"""A request as the proxy hands it to all other services, and as the request store keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millrace.core.kv.transfer import Incarnation
from millrace.core.request import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw a request's tokens. The ranges are in `SamplingParams` of proto/common.proto."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1  # choices
    logprobs: int = -1  # -1: none; k: the chosen token's and those of the k likeliest tokens
    prompt_logprobs: int = -1  # counted in the same way


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """Describes a request to the services. The prompt's token ids are in the request store.

    `resumed_tokens` counts the last tokens of the prompt that earlier incarnations of the request
    generated. `prefix_hashes` name the whole blocks of the prompt (`core.kv.prefix`), each of
    `prefix_block_tokens` tokens, chained to `prefix_root`. With `prefix_block_tokens` 0 the request
    shares no KV with other requests.
    """

    request_id: str
    proxy: Incarnation
    model: str
    prompt_tokens: int
    sampling: SamplingParams
    slo: Slo = field(default_factory=Slo)
    arrival_unix_s: float = 0.0
    traceparent: str = ""  # W3C trace context; empty: none
    resumed_tokens: int = 0
    prefix_hashes: Sequence[int] = ()
    prefix_block_tokens: int = 0
    prefix_root: int = 0
