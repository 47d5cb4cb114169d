"""Between protobuf messages and the engine's own types: sampling, log-probabilities, spans."""

from __future__ import annotations

import time

from millrace.core.cost.decode_step import DecodeStepTime
from millrace.engine.sampling.logprobs import PositionLogprobs
from millrace.engine.sampling.spec import SamplingSpec
from millrace.wire.pb import common_pb2, scheduler_pb2


def sampling_spec(spec: common_pb2.RequestSpec) -> SamplingSpec:
    """The engine's sampling settings of a request."""
    message = spec.sampling
    return SamplingSpec(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        n=message.n,
        logprobs=message.logprobs,
        prompt_logprobs=message.prompt_logprobs,
        resumed_tokens=spec.resumed_tokens,
    )


def logprobs_message(found: PositionLogprobs | None) -> common_pb2.PositionLogprobs | None:
    """The wire form of one position's log-probabilities; None stays None."""
    if found is None:
        return None
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=found.chosen[0], logprob=found.chosen[1]),
        top=[common_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in found.top],
    )


def decode_step_message(step: DecodeStepTime) -> scheduler_pb2.DecodeStepTime:
    return scheduler_pb2.DecodeStepTime(
        base_s=step.base_s,
        per_sequence_s=step.per_sequence_s,
        per_context_token_s=step.per_context_token_s,
    )


class Stopwatch:
    """Turns this process's clock into seconds since a request's arrival at the proxy."""

    def __init__(self, arrival_unix_s: float) -> None:
        self._arrival_unix_s = arrival_unix_s

    def now_s(self) -> float:
        return time.time() - self._arrival_unix_s


def span(
    name: str,
    instance_id: str,
    start_s: float,
    end_s: float,
    **attributes: object,
) -> common_pb2.Span:
    """A bar of the waterfall; times in seconds since the request's arrival."""
    return common_pb2.Span(
        name=name,
        instance_id=instance_id,
        start_s=start_s,
        end_s=max(start_s, end_s),
        attributes={k: str(v) for k, v in attributes.items()},
    )
