"""Translates first tokens and token events to and from protobuf."""

from __future__ import annotations

from collections.abc import Iterable

from millrace.core.kv.transfer import Ticket
from millrace.core.token_events import FinishedPrefill, FirstToken, PositionLogprobs, TokenEvent
from millrace.wire.codec.incarnation import incarnation_message
from millrace.wire.codec.trace import span_to_wire, spans_from_wire, spans_to_wire
from millrace.wire.pb import common_pb2, decode_pb2, transfer_pb2


def logprobs_message(found: PositionLogprobs | None) -> common_pb2.PositionLogprobs:
    """Encodes log probabilities; None (a position without them) becomes an empty message."""
    if found is None:
        return common_pb2.PositionLogprobs()
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=found.chosen[0], logprob=found.chosen[1]),
        top=[common_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in found.top],
    )


def logprobs_of(message: common_pb2.PositionLogprobs) -> PositionLogprobs | None:
    if not message.HasField("chosen"):
        return None
    return present_logprobs_of(message)


def present_logprobs_of(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    """Decodes a position that has log probabilities."""
    return PositionLogprobs(
        chosen=(message.chosen.token_id, message.chosen.logprob),
        top=tuple((one.token_id, one.logprob) for one in message.top),
    )


# ---- decode -> proxy


def batch_message(events: Iterable[TokenEvent]) -> decode_pb2.TokenBatch:
    """Encodes all events that are ready in one message.

    Each event is built within the batch, which saves a copy; empty fields are skipped.
    """
    batch = decode_pb2.TokenBatch()
    add = batch.events.add
    for event in events:
        message = add(
            request_id=event.request_id,
            choice=event.choice,
            token_ids=event.token_ids,
            stop_token_id=event.stop_token_id,
        )
        if event.logprobs:
            message.logprobs.extend(map(logprobs_message, event.logprobs))
        if event.finish_reason:
            message.finish_reason = event.finish_reason
        if event.error:
            message.error = event.error
        if event.spans:
            message.spans.extend(map(span_to_wire, event.spans))
        if event.prompt_logprobs:
            message.prompt_logprobs.extend(map(logprobs_message, event.prompt_logprobs))
        if event.cached_tokens:
            message.cached_tokens = event.cached_tokens
    return batch


def events_of(batch: decode_pb2.TokenBatch) -> list[TokenEvent]:
    return [_event_of(message) for message in batch.events]


def _event_of(message: decode_pb2.TokenEvent) -> TokenEvent:
    return TokenEvent(
        request_id=message.request_id,
        choice=message.choice,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(present_logprobs_of, message.logprobs)),
        finish_reason=message.finish_reason,
        error=message.error,
        stop_token_id=message.stop_token_id,
        spans=tuple(spans_from_wire(message.spans)),
        prompt_logprobs=tuple(map(logprobs_of, message.prompt_logprobs)),
        cached_tokens=message.cached_tokens,
    )


# ---- prefill -> decode


def finished_message(
    ticket: Ticket, finished: FinishedPrefill
) -> transfer_pb2.FinishPrefillRequest:
    return transfer_pb2.FinishPrefillRequest(
        request_id=ticket.request_id,
        sender=incarnation_message(ticket.sender),
        receiver=incarnation_message(ticket.receiver),
        attempt=ticket.attempt,
        first_tokens=[_first_token_message(first) for first in finished.first_tokens],
        spans=spans_to_wire(finished.spans),
        prompt_logprobs=map(logprobs_message, finished.prompt_logprobs),
        total_chunks=finished.total_chunks,
        cached_tokens=finished.cached_tokens,
    )


def finished_of(message: transfer_pb2.FinishPrefillRequest) -> FinishedPrefill:
    """Decodes the message without its ticket, which `ticket_of` decodes."""
    return FinishedPrefill(
        total_chunks=message.total_chunks,
        first_tokens=tuple(
            FirstToken(
                first.token_id,
                logprobs_of(first.logprobs) if first.HasField("logprobs") else None,
            )
            for first in message.first_tokens
        ),
        spans=tuple(spans_from_wire(message.spans)),
        prompt_logprobs=tuple(map(logprobs_of, message.prompt_logprobs)),
        cached_tokens=message.cached_tokens,
    )


def _first_token_message(first: FirstToken) -> transfer_pb2.FirstToken:
    logprobs = None if first.logprobs is None else logprobs_message(first.logprobs)
    return transfer_pb2.FirstToken(token_id=first.token_id, logprobs=logprobs)
