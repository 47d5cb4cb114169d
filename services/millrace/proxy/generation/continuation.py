"""The next life of a request whose decode instance is gone: the rest, as a request of its own."""

from __future__ import annotations

from millrace.wire.pb import common_pb2


def continuation(
    spec: common_pb2.RequestSpec, request_id: str, generated: int
) -> common_pb2.RequestSpec:
    """The spec of what is left of `spec` behind `generated` tokens, which end its prompt.

    What those tokens have counts for is not asked for again: a time to first token, and the
    prompt's log probabilities.
    """
    rest = common_pb2.RequestSpec()
    rest.CopyFrom(spec)
    rest.request_id = request_id
    if generated:
        rest.prompt_tokens += generated
        rest.resumed_tokens += generated
        rest.sampling.max_tokens -= generated
        rest.sampling.min_tokens = max(rest.sampling.min_tokens - generated, 0)
        rest.sampling.prompt_logprobs = -1
        rest.slo.ttft_s = 0.0
    return rest
