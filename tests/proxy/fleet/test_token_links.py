"""The streams of tokens reconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from millrace.core.backoff import Backoff
from millrace.core.incarnation import Incarnation
from millrace.core.scheduler.commands import Member
from millrace.core.token_events import TokenBatch, TokenEvent
from millrace.instance.tokens.servicer import TokenServicer
from millrace.instance.tokens.streams import TokenStreams
from millrace.proxy.fleet import token_links
from millrace.proxy.fleet.token_links import TokenLinks
from millrace.wire.codec.token_events import batch_message
from millrace.wire.pb import decode_pb2, decode_pb2_grpc
from millrace.wire.server import bind, create_server
from support.deadlines import HANG_S
from support.live_stack import eventually
from support.relay import Relay, relay

STREAMS = 24
PROXY, DECODE = Incarnation("x", 1), Incarnation("d0", 1)


class ShortStreams(decode_pb2_grpc.DecodeServicer):
    """Every stream is up, and ends at once."""

    async def StreamTokens(
        self, request: Any, context: Any
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        yield batch_message(TokenBatch(0, []))


class Listener:
    def __init__(self) -> None:
        self.lost: list[bool] = []  # of each stream that was up
        self.breaks = 0
        self.tokens: list[int] = []

    @property
    def events(self) -> int:
        return len(self.tokens)

    def on_batch(self, decode: Incarnation, events: Sequence[TokenEvent]) -> None:
        self.tokens += [token for event in events for token in event.token_ids]

    def on_stream_up(self, decode: Incarnation, *, lost: bool) -> None:
        self.lost.append(lost)

    def on_tokens_lost(self, decode: Incarnation) -> None:
        self.breaks += 1


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


class CountedStreams(TokenStreams):
    """Counts the events that streams have taken: they are on their way."""

    _taken = 0

    async def subscribe(
        self, proxy: Incarnation, received: int | None = None
    ) -> AsyncGenerator[TokenBatch, None]:
        async with aclosing(super().subscribe(proxy, received)) as batches:
            async for batch in batches:
                self._taken += len(batch.events)
                yield batch

    def has_taken(self, events: int) -> bool:
        return self._taken == events


@asynccontextmanager
async def over_a_relay() -> AsyncIterator[tuple[CountedStreams, Relay, Listener]]:
    """An instance's token streams, and a listener that reaches them by a relay."""
    streams, listener = CountedStreams(HANG_S, lambda proxy: None), Listener()
    server = create_server()
    TokenServicer(streams, DECODE).add_to(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    links = TokenLinks(PROXY, listener)
    try:
        async with relay("127.0.0.1", port) as way:
            links.keep([Member(incarnation=DECODE, address=f"127.0.0.1:{way.port}")])
            await eventually(lambda: listener.lost == [False])
            yield streams, way, listener
    finally:
        await links.close()
        await server.stop(None)


def publish(streams: TokenStreams, token: int) -> None:
    streams.publish(PROXY, TokenEvent("r", token_ids=(token,)))


async def test_a_connection_that_breaks_while_tokens_are_under_way_loses_none() -> None:
    """They have left the instance and have not reached the proxy: they are in the network."""
    async with over_a_relay() as (streams, way, listener):
        publish(streams, 0)
        await eventually(lambda: listener.tokens == [0])
        way.strand()
        for token in range(1, 9):  # one message each
            publish(streams, token)
            await eventually(partial(streams.has_taken, token + 1))
        way.cut()
        way.heal()
        publish(streams, 9)
        await eventually(lambda: listener.tokens == list(range(10)))
        assert (listener.breaks, listener.lost) == (0, [False, False])


async def test_tokens_that_are_no_longer_kept_are_known_to_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millrace.instance.tokens.streams.MOST_KEPT_EVENTS", 3)
    async with over_a_relay() as (streams, way, listener):
        way.strand()
        for token in range(5):
            publish(streams, token)
        await eventually(partial(streams.has_taken, 5))
        way.cut()
        way.heal()
        await eventually(lambda: listener.lost == [False, True])
        publish(streams, 5)
        await eventually(lambda: listener.tokens == [5])


@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_an_instance_that_is_not_reached_again_is_told_of(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused connection says so at once, and a silent one in time; the stream comes back."""
    within_s = 0.2 if how == "silent" else HANG_S
    monkeypatch.setattr(token_links, "RESUME_WITHIN_S", within_s)
    async with over_a_relay() as (streams, way, listener):
        if how == "silent":
            way.stall()
        way.cut()
        if how == "silent":
            way.reopen()
        await eventually(lambda: listener.breaks == 1)
        publish(streams, 0)
        way.heal()
        await eventually(lambda: listener.tokens == [0])
        assert listener.lost == [False, False]
