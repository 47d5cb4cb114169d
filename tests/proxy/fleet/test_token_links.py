"""The streams of tokens reconnect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

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
        self.ups = 0

    def on_batch(self, decode: Incarnation, events: Sequence[TokenEvent]) -> None: ...

    def on_stream_up(self, decode: Incarnation, *, lost: bool) -> None:
        self.ups += 1

    def on_tokens_lost(self, decode: Incarnation) -> None: ...


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
        await eventually(lambda: listener.ups >= STREAMS)
    finally:
        await links.close()
        await server.stop(None)
