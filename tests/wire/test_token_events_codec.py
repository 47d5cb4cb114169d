"""Token events: every field survives protobuf."""

from __future__ import annotations

from millrace.core.kv.transfer import Incarnation
from millrace.core.span import Span
from millrace.wire.codec.token_events import subscription, token_batch, token_events
from millrace.wire.pb import decode_pb2
from millrace.wire.token_events import (
    PositionLogprobs,
    TokenDetail,
    TokenEvent,
    TokenLogprob,
    no_detail,
)

DETAIL = TokenDetail(
    logprobs=(
        PositionLogprobs(
            chosen=TokenLogprob(token_id=1, logprob=-0.5),
            top=(TokenLogprob(token_id=2, logprob=-0.25), TokenLogprob(token_id=1, logprob=-0.5)),
        ),
    ),
    error="no luck",
    spans=(Span(name="chunk", instance_id="p", start_s=0.5, end_s=1.0, attributes={"a": "b"}),),
    prompt_logprobs=(PositionLogprobs(chosen=TokenLogprob(token_id=3, logprob=-1.5)),),
    cached_tokens=4,
)


def over_the_wire(events: list[TokenEvent]) -> list[TokenEvent]:
    sent = token_batch(events).SerializeToString()
    return token_events(decode_pb2.TokenBatch.FromString(sent))


def test_every_field_of_an_event_arrives():
    event = TokenEvent("r", 1, [2, -3], "stop", 5, lambda: DETAIL)
    (message,) = token_batch([event]).events
    fields = {field.name for field, _ in message.ListFields()}
    assert fields == {field.name for field in message.DESCRIPTOR.fields}
    (found,) = over_the_wire([event])
    assert found[:5] == event[:5]
    assert found.detail() == DETAIL


def test_events_of_tokens_alone_arrive_in_order():
    events = [TokenEvent(f"r{i}", 0, [i]) for i in range(3)]
    found = over_the_wire(events)
    assert [event[:5] for event in found] == [event[:5] for event in events]
    assert {event.stop_token_id for event in found} == {-1}
    assert all(event.detail() == no_detail() == TokenDetail() for event in found)
    assert over_the_wire([]) == []


def test_a_subscription_names_both_incarnations():
    found = subscription(Incarnation("x", 1), Incarnation("d", 1 << 63))
    assert (found.proxy.id, found.proxy.generation) == ("x", 1)
    assert (found.decode.id, found.decode.generation) == ("d", 1 << 63)
