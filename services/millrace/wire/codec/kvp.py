"""Translates the messages between KV owners and KVP workers."""

from __future__ import annotations

from millrace.core.errors import TransferError
from millrace.core.kv.kvp_hold import AttachAsk, AttachGrant, HoldAsk
from millrace.wire.codec.derive import derive
from millrace.wire.codec.transfer import LAYOUT
from millrace.wire.pb import kvp_pb2

ATTACH = derive(AttachAsk, kvp_pb2.AttachRequest, layout=LAYOUT)
GRANT = derive(AttachGrant, kvp_pb2.AttachGrant)
HOLD = derive(HoldAsk, kvp_pb2.HoldRequest, layout=LAYOUT)


def attach_of(message: kvp_pb2.AttachRequest) -> AttachAsk:
    """Decodes a request to attach. Raises TransferError if `max_rows` is 0."""
    if not message.max_rows:
        raise TransferError("a peer sent a bad attachment: max_rows is 0; it must be at least 1")
    return ATTACH.decode(message)


def hold_of(message: kvp_pb2.HoldRequest) -> HoldAsk:
    """Decodes a request to hold a shard. Raises TransferError for bad token positions."""
    if not 0 < message.start_token < message.end_token:
        raise TransferError(
            f"a peer sent a bad shard: tokens [{message.start_token}, {message.end_token}); it "
            "must begin after the KV owner's tokens and hold at least 1 token"
        )
    return HOLD.decode(message)
