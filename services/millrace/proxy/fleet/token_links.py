"""Token streams: one from each decode instance, open before any request is placed there."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from typing import Protocol

import grpc

from millrace.proxy.codec import Life, incarnation_of, life_of
from millrace.wire.channel import open_channel
from millrace.wire.pb import decode_pb2, decode_pb2_grpc, scheduler_pb2

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 2.0


class TokenEvents(Protocol):
    """Who hears of tokens. Called on the event loop; must not wait."""

    def on_batch(self, decode: Life, events: Iterable[decode_pb2.TokenEvent]) -> None: ...

    def on_tokens_lost(self, decode: Life) -> None:
        """The stream of `decode` broke: events may be missing."""


class TokenLinks:
    """The streams, by life of the decode instance. A new life gets a new stream."""

    def __init__(self, life: Life, events: TokenEvents) -> None:
        self._life = life
        self._events = events
        self._links: dict[Life, asyncio.Task[None]] = {}
        self._listed: set[Life] = set()

    def keep(self, members: Iterable[scheduler_pb2.Member]) -> None:
        """Opens streams to all members. Those to others stay until they break or `prune`."""
        self._listed = set()
        for member in members:
            life = life_of(member.incarnation)
            self._listed.add(life)
            self.open(life, member.address)

    def open(self, life: Life, address: str) -> None:
        """Opens a stream to one instance unless there is one."""
        if life not in self._links:
            self._links[life] = asyncio.create_task(self._run(life, address))

    def prune(self, in_use: set[Life]) -> None:
        """Ends streams to instances that left the fleet and serve no request any more."""
        for life in self._links.keys() - self._listed - in_use:
            self._links.pop(life).cancel()

    async def close(self) -> None:
        tasks = list(self._links.values())
        self._links.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, life: Life, address: str) -> None:
        """Serves and reconnects until the instance is known to be gone."""
        retry_s = RETRY_FIRST_S
        while True:
            reason, gone = "the stream ended", False
            try:
                async with open_channel(address) as channel:
                    await self._serve(decode_pb2_grpc.DecodeStub(channel), life)
            except grpc.aio.AioRpcError as error:
                reason = error.details() or str(error.code())
                gone = error.code() == grpc.StatusCode.FAILED_PRECONDITION
            except Exception as error:  # a defect must not silence the instance for good
                log.exception("decode %s", life[0])
                reason = repr(error)
            log.warning("decode %s at %s: %s", life[0], address, reason)
            self._events.on_tokens_lost(life)
            if gone or life not in self._listed:
                self._links.pop(life, None)
                return
            await asyncio.sleep(retry_s * random.uniform(0.7, 1.3))
            retry_s = min(2 * retry_s, RETRY_MOST_S)

    async def _serve(self, stub: decode_pb2_grpc.DecodeStub, life: Life) -> None:
        """Reads one stream to its end. Waits while the instance can't be reached: nothing is lost
        before it has been, since an instance keeps events until they are asked for."""
        call = stub.StreamTokens(
            decode_pb2.TokenSubscription(
                proxy=incarnation_of(self._life), decode=incarnation_of(life)
            ),
            wait_for_ready=True,
        )
        try:
            async for batch in call:
                self._events.on_batch(life, batch.events)
        finally:
            call.cancel()
