"""What a decode instance tells a proxy of a request: its first tokens, and one of each step."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.decode.request import DecodeRequest
from millrace.engine.decode_batch import TokenOut
from millrace.instance.codec import logprobs_message
from millrace.wire.pb import decode_pb2, transfer_pb2


def first_token_events(
    request: DecodeRequest, message: transfer_pb2.FinishPrefillRequest
) -> Iterator[decode_pb2.TokenEvent]:
    """One a choice; the first has what prefill says of the prompt."""
    for choice, first in enumerate(message.first_tokens):
        event = decode_pb2.TokenEvent(
            request_id=request.id, choice=choice, token_ids=[first.token_id], stop_token_id=-1
        )
        if request.sampling.logprobs >= 0:
            event.logprobs.append(first.logprobs)
        if choice == 0:
            event.spans.extend(s for s in message.spans if s is not request.transfer)
            event.prompt_logprobs.extend(message.prompt_logprobs)
            event.cached_tokens = message.cached_tokens or request.cached_tokens
        yield event


def step_event(out: TokenOut) -> decode_pb2.TokenEvent:
    """A token of a step."""
    event = decode_pb2.TokenEvent(
        request_id=out.request_id, choice=out.choice, token_ids=[out.token_id], stop_token_id=-1
    )
    if (logprobs := logprobs_message(out.logprobs)) is not None:
        event.logprobs.append(logprobs)
    return event
