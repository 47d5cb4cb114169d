"""Prefill and decode side by side, with requests that share prefixes; a test plays the others."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from millrace.core.kv.prefix import block_hashes, prefix_root
from millrace.decode.loop import DecodeRole
from millrace.prefill.loop import PrefillRole
from millrace.state.memory_store import MemoryStore
from millrace.transfer.transport.memory import MemoryHub
from millrace.wire.channel import open_channel
from millrace.wire.pb import common_pb2, decode_pb2, decode_pb2_grpc, scheduler_pb2
from support.live_stack import eventually
from support.worker_roles import (
    PROXY,
    LiveRole,
    admit_decode,
    config,
    live_roles,
    remember,
    run_prefill,
    spec,
)

BLOCK = 64


def with_blocks(
    request: common_pb2.RequestSpec, ids: list[int], *, block: int = BLOCK, salt: str = ""
) -> common_pb2.RequestSpec:
    """Names the prompt's blocks, as its proxy does."""
    request.prefix_block_tokens, request.prefix_root = block, prefix_root(block, salt)
    request.prefix_hashes.extend(block_hashes(array("i", ids), block, request.prefix_root))
    return request


@dataclass
class PrefixPair:
    store: MemoryStore
    prefill: LiveRole
    decode: LiveRole
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    spans: dict[str, dict[str, common_pb2.Span]] = field(default_factory=dict)
    ended: set[tuple[str, int]] = field(default_factory=set)

    async def request(self, name: str, ids: list[int], **more: Any) -> common_pb2.RequestSpec:
        """One that shares its blocks, and whose prompt lies in the store."""
        request = with_blocks(spec(name, len(ids), **more), ids)
        await remember(self.store, request, ids)
        return request

    def send(self, request: common_pb2.RequestSpec, kept: int = 0) -> None:
        """Plays the scheduler; decode is to begin with `kept` tokens of its cache."""
        admit, run = admit_decode(request), run_prefill(request, self.decode.member)
        admit.admit_decode.kept_tokens = kept
        run.run_prefill.chunks[0].start_token = kept
        run.run_prefill.chunks[0].num_tokens -= kept
        self.decode.role.on_command(admit)
        self.prefill.role.on_command(run)

    async def over(self, name: str) -> None:
        """Nothing is held of the request any more."""
        await self.decode.said("request_finished", name)
        await self.prefill.said("request_released", name)
        await eventually(lambda: (name, 0) in self.ended)

    async def answer(self, name: str, ids: list[int], kept: int = 0, **more: Any) -> list[int]:
        """The tokens of choice 0."""
        self.send(await self.request(name, ids, **more), kept)
        await self.over(name)
        return self.tokens[name, 0]

    def computed(self, name: str) -> list[tuple[int, int]]:
        """(history, tokens) of each pass of a request at prefill."""
        passes = [s for k, s in self.spans[name].items() if k.startswith("chunk")]
        return [(int(s.attributes["history"]), int(s.attributes["tokens"])) for s in passes]

    async def read_tokens(self) -> None:
        async with open_channel(self.decode.address) as channel:
            stream = decode_pb2_grpc.DecodeStub(channel).StreamTokens(
                decode_pb2.TokenSubscription(proxy=PROXY, decode=self.decode.incarnation)
            )
            async for batch in stream:
                for event in batch.events:
                    self._take(event)

    def _take(self, event: decode_pb2.TokenEvent) -> None:
        key = (event.request_id, event.choice)
        if key not in self.tokens and event.choice == 0:
            self.cached[event.request_id] = event.cached_tokens
        self.tokens.setdefault(key, []).extend(event.token_ids)
        spans = self.spans.setdefault(event.request_id, {})
        spans.update({span.name: span for span in event.spans})
        if event.finish_reason:
            self.ended.add(key)


@asynccontextmanager
async def prefix_pair(**engine: Any) -> AsyncIterator[PrefixPair]:
    """`engine` are fields of its settings, of both."""
    settings = config(**{"max_chunk_tokens": 256, "max_batch": 4, **engine})
    store, hub = MemoryStore(settings.store), MemoryHub()
    prefill = LiveRole(PrefillRole, settings, name="prefill-0", hub=hub, store=store)
    decode = LiveRole(DecodeRole, settings, name="decode-0", hub=hub, store=store)
    async with live_roles(prefill, decode):
        made = PrefixPair(store, prefill, decode)
        reader = asyncio.create_task(made.read_tokens())
        yield made
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


class Listener:
    """What a role's heartbeats say of its cache, put together as the scheduler does."""

    def __init__(self, role: LiveRole) -> None:
        self._role = role
        self.blocks: set[int] = set()

    def register(self) -> scheduler_pb2.Register:
        register = scheduler_pb2.Register(kv_pages=self._role.engine.pool.num_pages)
        self._role.role.fill_register(register)
        return register

    def hear(self) -> set[int]:
        cached = self._role.role.heartbeat().cached
        if cached.whole:
            self.blocks.clear()
        self.blocks |= set(cached.added)
        self.blocks -= set(cached.removed)
        return self.blocks
