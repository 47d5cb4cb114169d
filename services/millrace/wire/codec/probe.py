"""Translates the endpoints of KV path probes to and from protobuf."""

from __future__ import annotations

from millrace.core.kv.probe import ProbeEndpoint
from millrace.wire.pb import transfer_pb2


def endpoint_message(endpoint: ProbeEndpoint) -> transfer_pb2.ProbeEndpoint:
    return transfer_pb2.ProbeEndpoint(agent_metadata=endpoint.agent_metadata, seed=endpoint.seed)


def endpoint_of(message: transfer_pb2.ProbeEndpoint) -> ProbeEndpoint:
    return ProbeEndpoint(agent_metadata=message.agent_metadata, seed=message.seed)
