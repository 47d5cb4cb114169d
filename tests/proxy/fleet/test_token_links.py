"""The streams of tokens reconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from millrace.core.backoff import Backoff
from millrace.core.incarnation import Incarnation
from millrace.core.scheduler.commands import Member
from millrace.core.token_events import TokenBatch, TokenEvent
from millrace.proxy.fleet.token_links import TokenLinks
from millrace.wire.codec.token_events import batch_message
from millrace.wire.pb import decode_pb2, decode_pb2_grpc
from millrace.wire.server import bind, create_server
from support.deadlines import HANG_S
from support.live_stack import eventually

STREAMS = 24


class ShortStreams(decode_pb2_grpc.DecodeServicer):
    """Every stream is up, and ends at once."""

    async def StreamTokens(
        self, request: Any, context: Any
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        yield batch_message(TokenBatch(0, []))


class Listener:
    def __init__(self) -> None:
        self.lost: list[bool] = []  # of each stream that was up
        self.events = 0

    def on_batch(self, decode: Incarnation, events: Sequence[TokenEvent]) -> None:
        self.events += len(events)

    def on_stream_up(self, decode: Incarnation, *, lost: bool) -> None:
        self.lost.append(lost)

    def on_tokens_lost(self, decode: Incarnation) -> None: ...


class Streams(decode_pb2_grpc.DecodeServicer):
    """Each stream sends an event and stays; `skipped` are sent to a stream that nobody reads."""

    def __init__(self) -> None:
        self.sent = 0
        self.skipped = 0

    async def StreamTokens(
        self, request: Any, context: Any
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        first = self.sent + self.skipped
        self.sent = first + 1
        yield batch_message(TokenBatch(first, [TokenEvent("r", token_ids=(5,))]))
        await asyncio.Event().wait()


@pytest.mark.parametrize("skipped", [0, 1])
async def test_an_instance_that_was_out_of_the_fleet_for_a_moment_has_lost_what_nobody_read(
    skipped: int,
):
    """A scheduler that ends reports a fleet without its instances. The requests that the next one
    places there were migrated if the stream ended meanwhile.
    """
    server, listener, servicer = create_server(), Listener(), Streams()
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server)
    decode = Member(
        incarnation=Incarnation("d0", 1), address=f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    )
    await server.start()
    links = TokenLinks(Incarnation("x", 1), listener)
    try:
        links.keep([decode])
        await eventually(lambda: listener.events == 1)
        links.keep([])
        links.prune(set())
        servicer.skipped = skipped
        links.keep([decode])
        await eventually(lambda: listener.events == 2)
    finally:
        await links.close()
        await server.stop(None)
    assert listener.lost == [False, bool(skipped)]


async def test_a_stream_that_was_up_is_opened_again_after_the_first_pause():
    """Pauses that grew with each of these streams would last hours."""
    retry = Backoff(0.001, 1e6)
    assert sum(retry.pause_s(earlier) for earlier in range(STREAMS)) > HANG_S
    server, listener = create_server(), Listener()
    decode_pb2_grpc.add_DecodeServicer_to_server(ShortStreams(), server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    links = TokenLinks(Incarnation("x", 1), listener, retry)
    try:
        links.keep([Member(incarnation=Incarnation("d0", 1), address=address)])
        await eventually(lambda: len(listener.lost) >= STREAMS)
    finally:
        await links.close()
        await server.stop(None)
