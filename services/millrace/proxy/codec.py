"""Between the proxy's own types and the wire's."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.request import Slo
from millrace.proxy.errors import RETRY_AFTER_S, ApiError
from millrace.proxy.request.options import Sampling
from millrace.wire.pb import common_pb2, scheduler_pb2

Life = tuple[str, int]  # id and generation

_REFUSALS = {"overloaded": 429, "unavailable": 503, "too_large": 400, "invalid": 400}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """Log probabilities at one position: the token that stands there, and the likeliest ones."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


def life_of(incarnation: common_pb2.Incarnation) -> Life:
    return incarnation.id, incarnation.generation


def incarnation_of(life: Life) -> common_pb2.Incarnation:
    return common_pb2.Incarnation(id=life[0], generation=life[1])


def refusal(refused: scheduler_pb2.Refused) -> ApiError:
    """What the client hears of the scheduler's refusal."""
    status = _REFUSALS.get(refused.code, 503)
    retry_after_s = None if status == 400 else refused.retry_after_s or RETRY_AFTER_S
    return ApiError(status, refused.message, code=refused.code, retry_after_s=retry_after_s)


def sampling_message(
    sampling: Sampling, *, max_tokens: int, choices: int, prompt_logprobs: int
) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        n=choices,
        logprobs=sampling.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def slo_message(slo: Slo) -> common_pb2.Slo:
    return common_pb2.Slo(
        ttft_s=slo.ttft_s or 0.0, tbt_s=slo.tbt_s or 0.0, class_name=slo.class_name
    )


def position_logprobs(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        chosen=_token_logprob(message.chosen), top=tuple(map(_token_logprob, message.top))
    )


def _token_logprob(message: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token_id=message.token_id, logprob=message.logprob)
