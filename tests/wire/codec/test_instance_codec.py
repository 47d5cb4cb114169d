"""An instance's commands and reports: every field survives."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.cost.latency import Latency
from millrace.core.incarnation import Incarnation
from millrace.core.request import Slo
from millrace.core.scheduler import commands, reports
from millrace.wire.codec.instance import COMMANDS, REGISTRATION, REPORTS, registration_message
from millrace.wire.codec.request_spec import encode_spec, spec_message, spec_of
from millrace.wire.pb import common_pb2, scheduler_pb2
from support.messages import filled


def kinds(message: Any) -> list[str]:
    return [field.name for field in message.DESCRIPTOR.oneofs_by_name["kind"].fields]


@pytest.mark.parametrize("kind", kinds(scheduler_pb2.WorkerCommand))
def test_commands_come_back_as_they_were(kind: str) -> None:
    message = filled(scheduler_pb2.WorkerCommand, oneof=kind)
    message.ClearField("epoch")  # the stream's, not the command's
    command = COMMANDS.decode(message)
    assert command is not None
    assert COMMANDS.encode(command) == message
    assert COMMANDS.decode(COMMANDS.encode(command)) == command


@pytest.mark.parametrize("kind", [k for k in kinds(scheduler_pb2.WorkerMessage) if k != "register"])
def test_reports_come_back_as_they_were(kind: str) -> None:
    message = filled(scheduler_pb2.WorkerMessage, oneof=kind)
    message.ClearField("seen_epoch")  # of the first message alone
    report = REPORTS.decode(message)
    assert report is not None
    assert REPORTS.encode(report) == message
    assert REPORTS.decode(REPORTS.encode(report)) == report


def test_a_registration_comes_back_as_it_was() -> None:
    message = filled(scheduler_pb2.WorkerMessage, oneof="register")
    told = REGISTRATION.decode(message.register)
    assert registration_message(told, message.seen_epoch) == message
    assert REGISTRATION.decode(registration_message(told, 0).register) == told


def test_a_spec_comes_back_as_it_was() -> None:
    message = filled(common_pb2.RequestSpec)
    spec = spec_of(message)
    assert spec_message(spec) == message
    assert spec_of(common_pb2.RequestSpec.FromString(encode_spec(spec))) == spec
    assert spec.proxy == Incarnation(message.proxy.id, message.proxy.generation)


def test_what_was_not_sent_is_none_or_its_default() -> None:
    assert REPORTS.decode(scheduler_pb2.WorkerMessage(heartbeat={})) == reports.Heartbeat()
    told = REGISTRATION.decode(scheduler_pb2.Register(role=scheduler_pb2.ROLE_PREFILL))
    assert told.latency is None and told.decode_step is None
    assert not registration_message(told, 0).register.HasField("latency")
    register = scheduler_pb2.Register(
        role=scheduler_pb2.ROLE_PREFILL,
        latency=scheduler_pb2.SpLatency(by_sp={1: scheduler_pb2.Latency(a=1)}),
    )
    latency = REGISTRATION.decode(register).latency
    assert latency is not None and dict(latency.by_sp) == {1: Latency(a=1, b=0)}
    assert spec_of(common_pb2.RequestSpec()).slo == Slo()


def test_attempts_count_from_one() -> None:
    for kind in ("run_prefill", "admit_decode"):
        command = COMMANDS.decode(scheduler_pb2.WorkerCommand(**{kind: {}}))
        assert isinstance(command, commands.RunPrefill | commands.AdmitDecode)
        assert command.attempt == 1


def test_messages_of_unknown_kinds_are_none() -> None:
    assert COMMANDS.decode(scheduler_pb2.WorkerCommand()) is None
    assert REPORTS.decode(scheduler_pb2.WorkerMessage()) is None
    assert REPORTS.decode(scheduler_pb2.WorkerMessage(register={})) is None
