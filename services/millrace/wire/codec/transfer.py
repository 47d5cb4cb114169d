"""Translates the messages of KV senders and receivers, and of probes of the KV path."""

from __future__ import annotations

from millrace.core.errors import ConfigError, TransferError
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.probe import Examination, ProbeEndpoint
from millrace.core.kv.transfer import HandshakeAsk, HandshakeGrant, HistoryAsk, Ticket
from millrace.wire.codec.derive import Codec, derive
from millrace.wire.codec.enums import MessageError
from millrace.wire.pb import transfer_pb2

_LAYOUT = derive(KvLayout, transfer_pb2.KvLayout)


def layout_of(message: transfer_pb2.KvLayout) -> KvLayout:
    """Decodes a KV layout. Raises TransferError for an impossible layout."""
    try:
        return _LAYOUT.decode(message)
    except (ConfigError, MessageError) as error:
        raise TransferError(f"a peer sent a bad KV layout: {error}") from error


layout_message = _LAYOUT.encode
LAYOUT = Codec(KvLayout, layout_message, layout_of)
TICKET = derive(Ticket, transfer_pb2.Ticket)
#: The codecs of messages with a layout raise TransferError for an impossible layout.
HANDSHAKE = derive(HandshakeAsk, transfer_pb2.HandshakeRequest, layout=LAYOUT)
GRANT = derive(HandshakeGrant, transfer_pb2.HandshakeGrant, layout=LAYOUT)
HISTORY = derive(HistoryAsk, transfer_pb2.SendHistoryRequest, layout=LAYOUT)
ENDPOINT = derive(ProbeEndpoint, transfer_pb2.ProbeEndpoint)
EXAMINATION = derive(Examination, transfer_pb2.Examination)
