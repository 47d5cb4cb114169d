"""Translates the messages between KV owners and KVP workers."""

from __future__ import annotations

from millrace.core.errors import TransferError
from millrace.core.kv.kvp_hold import AttachAsk, AttachGrant, HoldAsk
from millrace.wire.codec.incarnation import incarnation_message, incarnation_of
from millrace.wire.codec.transfer import layout_message, layout_of
from millrace.wire.pb import kvp_pb2


def attach_message(ask: AttachAsk) -> kvp_pb2.AttachRequest:
    return kvp_pb2.AttachRequest(
        owner=incarnation_message(ask.owner),
        worker=incarnation_message(ask.worker),
        layout=layout_message(ask.layout),
        max_rows=ask.max_rows,
        agent_metadata=ask.agent_metadata,
        region=ask.region,
        offset=ask.offset,
    )


def attach_of(message: kvp_pb2.AttachRequest) -> AttachAsk:
    """Decodes a request to attach. Raises TransferError if `max_rows` is 0."""
    if not message.max_rows:
        raise TransferError("a peer sent a bad attachment: max_rows is 0; it must be at least 1")
    return AttachAsk(
        owner=incarnation_of(message.owner),
        worker=incarnation_of(message.worker),
        layout=layout_of(message.layout),
        max_rows=message.max_rows,
        agent_metadata=message.agent_metadata,
        region=message.region,
        offset=message.offset,
    )


def grant_message(grant: AttachGrant) -> kvp_pb2.AttachNews:
    return kvp_pb2.AttachNews(
        slot=grant.slot,
        agent_metadata=grant.agent_metadata,
        region=grant.region,
        offset=grant.offset,
    )


def grant_of(message: kvp_pb2.AttachNews) -> AttachGrant:
    return AttachGrant(
        slot=message.slot,
        agent_metadata=message.agent_metadata,
        region=message.region,
        offset=message.offset,
    )


def hold_message(ask: HoldAsk) -> kvp_pb2.HoldRequest:
    return kvp_pb2.HoldRequest(
        request_id=ask.request_id,
        attempt=ask.attempt,
        owner=incarnation_message(ask.owner),
        worker=incarnation_message(ask.worker),
        layout=layout_message(ask.layout),
        start_token=ask.start_token,
        end_token=ask.end_token,
        prompt_tokens=ask.prompt_tokens,
    )


def hold_of(message: kvp_pb2.HoldRequest) -> HoldAsk:
    """Decodes a request to hold a shard. Raises TransferError for bad token positions."""
    if not 0 < message.start_token < message.end_token:
        raise TransferError(
            f"a peer sent a bad shard: tokens [{message.start_token}, {message.end_token}); it "
            "must begin after the KV owner's tokens and hold at least 1 token"
        )
    return HoldAsk(
        request_id=message.request_id,
        attempt=message.attempt or 1,
        owner=incarnation_of(message.owner),
        worker=incarnation_of(message.worker),
        layout=layout_of(message.layout),
        start_token=message.start_token,
        end_token=message.end_token,
        prompt_tokens=message.prompt_tokens,
    )
