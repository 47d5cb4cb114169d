"""Translates request specs to and from protobuf."""

from __future__ import annotations

from millrace.core.request import Slo
from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.wire.codec.incarnation import incarnation_message, incarnation_of
from millrace.wire.pb import common_pb2


def encode_spec(spec: RequestSpec) -> bytes:
    """Returns the spec as the request store keeps it and as the streams carry it."""
    return spec_message(spec).SerializeToString()


def decode_spec(encoded: bytes) -> RequestSpec:
    return spec_of(common_pb2.RequestSpec.FromString(encoded))


def spec_message(spec: RequestSpec) -> common_pb2.RequestSpec:
    slo = spec.slo
    return common_pb2.RequestSpec(
        request_id=spec.request_id,
        proxy=incarnation_message(spec.proxy),
        prompt_tokens=spec.prompt_tokens,
        sampling=_sampling_message(spec.sampling),
        slo=common_pb2.Slo(
            ttft_s=slo.ttft_s or 0.0, tbt_s=slo.tbt_s or 0.0, class_name=slo.class_name
        ),
        arrival_unix_s=spec.arrival_unix_s,
        traceparent=spec.traceparent,
        resumed_tokens=spec.resumed_tokens,
        prefix_hashes=spec.prefix_hashes,
        prefix_block_tokens=spec.prefix_block_tokens,
        prefix_root=spec.prefix_root,
    )


def spec_of(message: common_pb2.RequestSpec) -> RequestSpec:
    return RequestSpec(
        request_id=message.request_id,
        proxy=incarnation_of(message.proxy),
        prompt_tokens=message.prompt_tokens,
        sampling=_sampling_of(message.sampling),
        slo=slo_of(message.slo),
        arrival_unix_s=message.arrival_unix_s,
        traceparent=message.traceparent,
        resumed_tokens=message.resumed_tokens,
        prefix_hashes=tuple(message.prefix_hashes),
        prefix_block_tokens=message.prefix_block_tokens,
        prefix_root=message.prefix_root,
    )


def slo_of(message: common_pb2.Slo) -> Slo:
    """Decodes objectives; 0 seconds means that the request has no objective."""
    return Slo(
        ttft_s=message.ttft_s or None,
        tbt_s=message.tbt_s or None,
        class_name=message.class_name or "default",
    )


def _sampling_message(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
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
        n=sampling.n,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def _sampling_of(message: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
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
    )
