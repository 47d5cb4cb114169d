"""Codecs follow from the fields of both sides."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from millrace.core.cost.latency import Latency
from millrace.core.incarnation import Incarnation
from millrace.core.instance.standstill import Standstill
from millrace.core.kv.transfer import Ticket
from millrace.core.request import Slo
from millrace.core.scheduler import commands, effects, reports
from millrace.wire.codec.derive import Codec, Oneof, derive
from millrace.wire.codec.enums import MessageError
from millrace.wire.pb import common_pb2, scheduler_pb2, transfer_pb2


def test_named_tuples_and_nested_messages() -> None:
    tickets = derive(Ticket, transfer_pb2.Ticket)
    ticket = Ticket(request_id="r", sender=Incarnation("a", 1), receiver=Incarnation("b", 2))
    message = tickets.encode(ticket)
    assert (message.sender.id, message.receiver.generation, message.attempt) == ("a", 2, 1)
    assert tickets.decode(message) == ticket


def test_tuples_are_messages_with_fields_in_order_or_one_repeated_field() -> None:
    latencies = derive(Latency, scheduler_pb2.Latency)
    latency = Latency(a=1.0, points=((2, 0.5), (4, 0.75)))
    message = latencies.encode(latency)
    assert [(point.tokens, point.seconds) for point in message.points] == [(2, 0.5), (4, 0.75)]
    assert latencies.decode(message) == latency
    orders = derive(commands.Order, scheduler_pb2.Order)
    ref = effects.ChunkRef(request_id="r", chunk_index=1)
    order = commands.Order(queue=((ref,), (), (ref, ref)))
    sent = orders.encode(order)
    assert [len(entry.chunks) for entry in sent.queue] == [1, 0, 2]
    assert orders.decode(sent) == order


def test_what_is_absent_reads_as_none_or_as_the_default() -> None:
    beats = derive(reports.Heartbeat, scheduler_pb2.Heartbeat)
    assert beats.decode(scheduler_pb2.Heartbeat()) == reports.Heartbeat()
    still = reports.Heartbeat(standstill=Standstill(prepared=("a", "b")))
    assert beats.decode(beats.encode(still)) == still
    assert not beats.encode(reports.Heartbeat()).HasField("standstill")
    slos = derive(Slo, common_pb2.Slo)
    assert slos.decode(common_pb2.Slo()) == Slo(class_name="default")
    assert slos.decode(common_pb2.Slo(ttft_s=0.0, tbt_s=2.0, class_name="")) == Slo(
        tbt_s=2.0, class_name=""
    )
    assert derive(Ticket, transfer_pb2.Ticket).decode(transfer_pb2.Ticket()).attempt == 1


def test_an_enum_that_is_not_set_is_the_empty_word_only_as_a_default() -> None:
    registered = derive(commands.Registered, scheduler_pb2.Registered)
    assert registered.decode(scheduler_pb2.Registered()).preemption == ""
    assert registered.encode(commands.Registered()).preemption == 0
    with pytest.raises(MessageError, match="preemption is 'sometimes'; it must be none or chunk"):
        registered.encode(commands.Registered(preemption="sometimes"))
    finished = derive(reports.RequestFinished, scheduler_pb2.RequestFinished)
    with pytest.raises(MessageError, match="reason is 0; it must be stop or length"):
        finished.decode(scheduler_pb2.RequestFinished())


def test_fields_that_the_message_lacks_are_named_and_given() -> None:
    cancel = effects.CancelOn(instance_id="p", request_id="r", reason="why")
    with pytest.raises(TypeError, match=r"CancelOn and CancelRequest differ in \['instance_id'\]"):
        derive(effects.CancelOn, scheduler_pb2.CancelRequest)
    cancels = derive(effects.CancelOn, scheduler_pb2.CancelRequest, absent={"instance_id": "?"})
    decoded = cancels.decode(cancels.encode(cancel))
    assert (decoded.instance_id, decoded.request_id, decoded.reason) == ("?", "r", "why")


def test_a_special_codec_serves_a_field_and_the_elements_of_a_repeated_field() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Asked:
        request_ids: tuple[int, ...]

    numbers = Codec(int, str, int)
    asks = derive(Asked, scheduler_pb2.AskProgress, request_ids=numbers)
    message = asks.encode(Asked(request_ids=(4, 5)))
    assert list(message.request_ids) == ["4", "5"]
    assert asks.decode(message) == Asked(request_ids=(4, 5))


def test_a_oneof_goes_by_class_and_by_field() -> None:
    drain = derive(commands.Drain, scheduler_pb2.Drain)
    some: Oneof[commands.Drain, scheduler_pb2.WorkerCommand] = Oneof(
        scheduler_pb2.WorkerCommand, {"drain": drain}
    )
    message = some.encode(commands.Drain(abort=True))
    assert some.name(commands.Drain()) == message.WhichOneof("kind") == "drain"
    assert some.decode(message) == commands.Drain(abort=True)
    assert some.decode(scheduler_pb2.WorkerCommand()) is None
    assert some.decode(scheduler_pb2.WorkerCommand(cancel={})) is None
