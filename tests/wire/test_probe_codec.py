"""Probes' endpoints: every field survives protobuf."""

from __future__ import annotations

from millrace.wire.codec.transfer import endpoint_message, endpoint_of
from millrace.wire.pb import transfer_pb2
from support.messages import filled


def test_ends_come_back_as_they_were() -> None:
    message = filled(transfer_pb2.ProbeEndpoint)
    assert endpoint_message(endpoint_of(message)) == message
