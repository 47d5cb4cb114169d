"""Translates between the types of `transfer` and protobuf."""

from __future__ import annotations

import struct

from millrace.core.errors import ConfigError, TransferError
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.probe import ProbeEndpoint
from millrace.core.kv.sp_layout import Run
from millrace.core.kv.transfer import (
    HandshakeAsk,
    HandshakeGrant,
    HistoryAsk,
    Ticket,
)
from millrace.wire.codec.enums import EnumWords, MessageError
from millrace.wire.codec.incarnation import incarnation_message, incarnation_of
from millrace.wire.pb import transfer_pb2

_DTYPES = EnumWords(transfer_pb2.Dtype, "dtype")
_REGION = struct.Struct("<I")


def ticket_of(
    message: transfer_pb2.HandshakeRequest
    | transfer_pb2.FinishPrefillRequest
    | transfer_pb2.AbortTransferRequest
    | transfer_pb2.SendHistoryRequest,
) -> Ticket:
    """Returns the ticket of a message: the request, its sender and its receiver."""
    return Ticket(
        request_id=message.request_id,
        sender=incarnation_of(message.sender),
        receiver=incarnation_of(message.receiver),
        attempt=message.attempt or 1,
    )


def layout_message(layout: KvLayout) -> transfer_pb2.KvLayout:
    return transfer_pb2.KvLayout(
        model_hash=layout.model_hash,
        dtype=_DTYPES.number[layout.dtype],
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_tokens=layout.page_tokens,
        head_start=layout.head_start,
        head_count=layout.head_count,
        num_pages=layout.num_pages,
        parts=layout.parts,
        layer_start=layout.layer_start,
        model_layers=layout.model_layers,
    )


def layout_of(message: transfer_pb2.KvLayout) -> KvLayout:
    """Decodes a KV layout. Raises TransferError for an impossible layout."""
    try:
        return KvLayout(
            model_hash=message.model_hash,
            dtype=_DTYPES.word[message.dtype],
            num_layers=message.num_layers,
            num_kv_heads=message.num_kv_heads,
            head_dim=message.head_dim,
            page_tokens=message.page_tokens,
            head_start=message.head_start,
            head_count=message.head_count,
            num_pages=message.num_pages,
            parts=message.parts or 1,
            layer_start=message.layer_start,
            model_layers=message.model_layers,
        )
    except (ConfigError, MessageError) as error:
        raise TransferError(f"a peer sent a bad KV layout: {error}") from error


def ask_message(ask: HandshakeAsk) -> transfer_pb2.HandshakeRequest:
    return transfer_pb2.HandshakeRequest(
        request_id=ask.ticket.request_id,
        sender=incarnation_message(ask.ticket.sender),
        receiver=incarnation_message(ask.ticket.receiver),
        layout=layout_message(ask.layout),
        start_token=ask.start_token,
        num_tokens=ask.num_tokens,
        agent_metadata=ask.agent_metadata,
        attempt=ask.ticket.attempt,
    )


def ask_of(message: transfer_pb2.HandshakeRequest) -> HandshakeAsk:
    """Decodes a handshake's request. Raises TransferError for an impossible layout."""
    return HandshakeAsk(
        ticket=ticket_of(message),
        layout=layout_of(message.layout),
        start_token=message.start_token,
        num_tokens=message.num_tokens,
        agent_metadata=message.agent_metadata,
    )


def history_message(ask: HistoryAsk) -> transfer_pb2.SendHistoryRequest:
    return transfer_pb2.SendHistoryRequest(
        request_id=ask.ticket.request_id,
        attempt=ask.ticket.attempt,
        sender=incarnation_message(ask.ticket.sender),
        receiver=incarnation_message(ask.ticket.receiver),
        layout=layout_message(ask.layout),
        pages=ask.pages,
        runs=[
            transfer_pb2.TokenRun(
                start_token=run.start_token, num_tokens=run.num_tokens, slot=run.slot
            )
            for run in ask.runs
        ],
        agent_metadata=ask.agent_metadata,
        region=ask.region,
    )


def history_of(message: transfer_pb2.SendHistoryRequest) -> HistoryAsk:
    """Decodes a request for history. Raises TransferError for an impossible layout."""
    return HistoryAsk(
        ticket=ticket_of(message),
        layout=layout_of(message.layout),
        pages=list(message.pages),
        runs=[Run(run.start_token, run.num_tokens, run.slot) for run in message.runs],
        agent_metadata=message.agent_metadata,
        region=message.region,
    )


def grant_message(grant: HandshakeGrant) -> transfer_pb2.HandshakeReply:
    """Encodes a grant. `backend_id` is the lease's number; `region` its index, little endian."""
    return transfer_pb2.HandshakeReply(
        layout=layout_message(grant.layout),
        pages=grant.pages,
        agent_metadata=grant.agent_metadata,
        region=_REGION.pack(grant.region),
        backend_id=grant.lease,
        buffered=grant.buffered,
        buffer_offset=grant.buffer_offset,
        buffer_bytes=grant.buffer_bytes,
        lease_s=grant.lease_s,
    )


def grant_of(message: transfer_pb2.HandshakeReply) -> HandshakeGrant:
    """Decodes a grant. Raises TransferError for an impossible reply."""
    try:
        (region,) = _REGION.unpack(message.region)
    except struct.error as error:
        raise TransferError(f"a peer sent a bad region: {error}") from error
    return HandshakeGrant(
        lease=message.backend_id,
        layout=layout_of(message.layout),
        pages=list(message.pages),
        agent_metadata=message.agent_metadata,
        region=region,
        lease_s=message.lease_s,
        buffered=message.buffered,
        buffer_offset=message.buffer_offset,
        buffer_bytes=message.buffer_bytes,
    )


def endpoint_message(endpoint: ProbeEndpoint) -> transfer_pb2.ProbeEndpoint:
    return transfer_pb2.ProbeEndpoint(agent_metadata=endpoint.agent_metadata, seed=endpoint.seed)


def endpoint_of(message: transfer_pb2.ProbeEndpoint) -> ProbeEndpoint:
    return ProbeEndpoint(agent_metadata=message.agent_metadata, seed=message.seed)
