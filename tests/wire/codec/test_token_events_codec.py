"""First tokens and token events: every field comes back as it was."""

from __future__ import annotations

from millrace.core.incarnation import Incarnation
from millrace.core.token_events import (
    NO_DETAIL,
    FirstToken,
    PositionLogprobs,
    TokenBatch,
    TokenDetail,
    TokenEvent,
)
from millrace.wire.codec.token_events import (
    FINISHED,
    batch_message,
    batch_of,
    logprobs_message,
    logprobs_of,
    subscription,
)
from millrace.wire.codec.transfer import TICKET
from millrace.wire.pb import decode_pb2, transfer_pb2
from support.messages import filled


def read(events: list[TokenEvent]) -> list[TokenEvent]:
    """The events with their details decoded."""
    return [event._replace(detail=event.detail()) for event in events]


def over_the_wire(events: list[TokenEvent]) -> list[TokenEvent]:
    sent = batch_message(TokenBatch(7, events)).SerializeToString()
    first, found = batch_of(decode_pb2.TokenBatch.FromString(sent))
    assert first == 7
    return read(found)


def test_token_events_come_back_as_they_were() -> None:
    batch = filled(decode_pb2.TokenBatch)
    found = batch_of(batch)
    events = found.events
    assert (len(events), found.first) == (2, batch.first)
    assert batch_message(found) == batch
    assert over_the_wire(events) == read(events)


def test_a_steps_event_has_one_token_and_nothing_else() -> None:
    event = TokenEvent("r", 1, [7])
    (message,) = batch_message(TokenBatch(0, [event])).events
    assert message == decode_pb2.TokenEvent(
        request_id="r", choice=1, token_ids=[7], stop_token_id=-1
    )
    assert over_the_wire([event]) == [event]


def test_events_of_tokens_alone_arrive_in_order() -> None:
    events = [TokenEvent(f"r{i}", 0, [i]) for i in range(3)]
    assert over_the_wire(events) == events
    assert {event.detail() for event in events} == {NO_DETAIL}
    assert over_the_wire([]) == []


def test_a_subscription_names_both_incarnations() -> None:
    found = subscription(Incarnation("x", 1), Incarnation("d", 1 << 63), None)
    assert (found.proxy.id, found.proxy.generation) == ("x", 1)
    assert (found.decode.id, found.decode.generation) == ("d", 1 << 63)
    assert not found.HasField("received")


def test_a_proxy_that_has_received_nothing_says_so() -> None:
    """It may have been sent events; a proxy that has not counted is not sent them again."""
    found = subscription(Incarnation("x", 1), Incarnation("d", 1), 0)
    assert found.HasField("received") and found.received == 0


def test_the_end_of_a_prefill_comes_back_as_it_was() -> None:
    message = filled(transfer_pb2.FinishPrefillRequest)
    assert TICKET.encode(TICKET.decode(message.ticket)) == message.ticket
    finished = FINISHED.decode(message.finished)
    assert FINISHED.encode(finished) == message.finished
    assert FINISHED.decode(FINISHED.encode(finished)) == finished


def test_positions_without_log_probabilities_are_none() -> None:
    assert logprobs_of(logprobs_message(None)) is None
    found = PositionLogprobs((5, -0.5))
    assert logprobs_of(logprobs_message(found)) == found
    message = transfer_pb2.FinishedPrefill(first_tokens=[{"token_id": 3}])
    assert FINISHED.decode(message).first_tokens == (FirstToken(3),)
    event = TokenEvent("r", token_ids=[], detail=TokenDetail(prompt_logprobs=(None, found)))
    assert over_the_wire([event]) == [event]
    result = TokenEvent("r", token_ids=[], finish_reason="length", detail=TokenDetail(pooled=b"f4"))
    assert over_the_wire([result]) == [result]
