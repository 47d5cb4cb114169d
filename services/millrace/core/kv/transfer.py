"""The messages of a KV sender and a KV receiver before and after the data (Tetris §4.2).

The wire turns these into protobuf and back; `millrace.transfer` decides with them. Data and its
accounting go over the transport, not in these messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Names one request's transfer between two incarnations; every message carries it.

    `attempt` counts up from 1 whenever a request's prefill is planned again.
    """

    request_id: str
    sender: Incarnation
    receiver: Incarnation
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeAsk:
    """A sender asks to transfer tokens ``[start_token, start_token + num_tokens)`` of a request.

    These are all tokens that belong at this receiver, also those that another sender has: the whole
    prompt, or a shard of it. `agent_metadata` is the sender's transport, so that the receiver can
    answer over it.
    """

    ticket: Ticket
    layout: KvLayout
    start_token: int
    num_tokens: int
    agent_metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeGrant:
    """The receiver's grant. `lease` is a number that the receiver never uses twice.

    `pages` are the receiver's pages of all tokens that were asked for, in order; data goes to the
    transport's `region`. With `buffered` that is the staging region, and data goes, packed, to
    ``[buffer_offset, buffer_offset + buffer_bytes)`` of it. The sender may write as long as it
    heard from the receiver within `lease_s`. With `checksums` every part must come with its crc32c.
    """

    lease: int
    layout: KvLayout
    pages: Sequence[int]
    agent_metadata: bytes
    region: int
    lease_s: float
    buffered: bool = False
    buffer_offset: int = 0
    buffer_bytes: int = 0
    checksums: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryAsk:
    """A member of a new group asks for KV that an earlier attempt left at the ticket's receiver.

    `runs` are the tokens it wants, and the slots of its `pages` where they belong; `region` is the
    index of the asker's pool in the transport that `agent_metadata` describes.
    """

    ticket: Ticket
    layout: KvLayout
    pages: Sequence[int]
    runs: Sequence[Run]
    agent_metadata: bytes
    region: int = 0


class HandshakeRefused(TransferError):
    """The receiver will never grant this handshake. The message names both sides' values."""


class HandshakeQueued(TransferError):
    """All backends are taken. The request keeps its place; the sender asks again."""
