"""Probes' endpoints: every field survives protobuf."""

from __future__ import annotations

from millrace.wire.codec.transfer import ENDPOINT
from millrace.wire.pb import transfer_pb2
from support.messages import filled


def test_ends_come_back_as_they_were() -> None:
    message = filled(transfer_pb2.ProbeEndpoint)
    assert ENDPOINT.encode(ENDPOINT.decode(message)) == message
