"""First tokens and token events: every field survives protobuf."""

from __future__ import annotations

from millrace.core.token_events import FirstToken, PositionLogprobs, TokenEvent
from millrace.wire.codec.tokens import (
    batch_message,
    events_of,
    finished_message,
    finished_of,
    logprobs_message,
    logprobs_of,
)
from millrace.wire.codec.transfer import ticket_of
from millrace.wire.pb import decode_pb2, transfer_pb2
from support.messages import filled


def test_token_events_come_back_as_they_were() -> None:
    batch = filled(decode_pb2.TokenBatch)
    events = events_of(batch)
    assert len(events) == 2
    assert batch_message(events) == batch
    assert events_of(batch_message(events)) == events


def test_a_steps_event_has_one_token_and_nothing_else() -> None:
    event = TokenEvent("r", 1, (7,))
    (message,) = batch_message([event]).events
    assert message == decode_pb2.TokenEvent(
        request_id="r", choice=1, token_ids=[7], stop_token_id=-1
    )
    assert events_of(batch_message([event])) == [event]


def test_the_end_of_a_prefill_comes_back_as_it_was() -> None:
    message = filled(transfer_pb2.FinishPrefillRequest)
    finished = finished_of(message)
    assert finished_message(ticket_of(message), finished) == message
    assert finished_of(finished_message(ticket_of(message), finished)) == finished


def test_positions_without_log_probabilities_are_none() -> None:
    assert logprobs_of(logprobs_message(None)) is None
    found = PositionLogprobs((5, -0.5))
    assert logprobs_of(logprobs_message(found)) == found
    message = transfer_pb2.FinishPrefillRequest(first_tokens=[{"token_id": 3}])
    assert finished_of(message).first_tokens == (FirstToken(3),)
    event = TokenEvent("r", prompt_logprobs=(None, found))
    assert events_of(batch_message([event])) == [event]
