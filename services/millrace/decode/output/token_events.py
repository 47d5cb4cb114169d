"""Builds the token events for a proxy: the first tokens, and one event per choice and step."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.core.token_events import FinishedPrefill, TokenDetail, TokenEvent
from millrace.decode.request import DecodeRequest
from millrace.engine.decode_batch import TokenOut
from millrace.wire.codec.token_events import encode_spans


def first_token_events(request: DecodeRequest, finished: FinishedPrefill) -> Iterator[TokenEvent]:
    """Yields one event per choice; the first event also has prefill's data about the prompt.

    The events of a prefill-only request have no tokens.
    """
    asked = request.sampling.logprobs >= 0
    for choice in range(request.sampling.n):
        firsts = finished.first_tokens[choice : choice + 1]
        logprobs = tuple(one.logprobs for one in firsts if asked and one.logprobs is not None)
        detail = TokenDetail(logprobs)
        if choice == 0:
            detail = detail._replace(
                spans=encode_spans(s for s in finished.spans if s is not request.transfer),
                prompt_logprobs=finished.prompt_logprobs,
                cached_tokens=finished.cached_tokens or request.cached_tokens,
                pooled=finished.pooled,
            )
        tokens = tuple(one.token_id for one in firsts)
        yield TokenEvent(request.id, choice, tokens, detail=detail, begins=choice == 0)


def step_event(out: TokenOut) -> TokenEvent:
    """Builds the event of one token of a step."""
    if out.logprobs is None:
        return TokenEvent(out.request_id, out.choice, (out.token_id,))
    return TokenEvent(
        out.request_id, out.choice, (out.token_id,), detail=TokenDetail((out.logprobs,))
    )
