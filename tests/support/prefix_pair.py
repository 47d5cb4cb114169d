"""Prefill and decode side by side, with requests that share prefixes; a test plays the others."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from millrace.core.kv.prefix import block_hashes, prefix_root
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.reports import Registration
from millrace.core.span import Span
from millrace.core.token_events import TokenEvent
from millrace.decode.loop import DecodeRole
from millrace.prefill.loop import PrefillRole
from millrace.state.memory_store import MemoryStore
from millrace.transfer.transport.memory import MemoryHub
from millrace.wire.clients.token_stream import token_events
from support.live_stack import eventually
from support.worker_roles import (
    PROXY,
    LiveRole,
    admit_decode,
    config,
    live_roles,
    registration,
    remember,
    run_prefill,
    spec,
)

BLOCK = 64


def with_blocks(
    request: RequestSpec, ids: list[int], *, block: int = BLOCK, salt: str = ""
) -> RequestSpec:
    """Names the prompt's blocks, as its proxy does."""
    root = prefix_root(block, salt)
    return replace(
        request,
        prefix_block_tokens=block,
        prefix_root=root,
        prefix_hashes=tuple(block_hashes(array("i", ids), block, root)),
    )


@dataclass
class PrefixPair:
    store: MemoryStore
    prefill: LiveRole
    decode: LiveRole
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    spans: dict[str, dict[str, Span]] = field(default_factory=dict)
    ended: set[tuple[str, int]] = field(default_factory=set)

    async def request(self, name: str, ids: list[int], **more: Any) -> RequestSpec:
        """One that shares its blocks, and whose prompt lies in the store."""
        request = with_blocks(spec(name, len(ids), **more), ids)
        await remember(self.store, request, ids)
        return request

    def send(self, request: RequestSpec, kept: int = 0) -> None:
        """Plays the scheduler; decode is to begin with `kept` tokens of its cache."""
        self.decode.role.on_command(admit_decode(request, kept_tokens=kept))
        run = run_prefill(request, self.decode.member, start_token=kept)
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
        address, life = self.decode.address, self.decode.incarnation
        async for events in token_events(address, proxy=PROXY, decode=life):
            for event in events:
                self._take(event)

    def _take(self, event: TokenEvent) -> None:
        key = (event.request_id, event.choice)
        if key not in self.tokens and event.choice == 0:
            self.cached[event.request_id] = event.detail().cached_tokens
        self.tokens.setdefault(key, []).extend(event.token_ids)
        spans = self.spans.setdefault(event.request_id, {})
        spans.update({span.name: span for span in event.detail().spans})
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

    def register(self) -> Registration:
        return registration(self._role)

    def hear(self) -> set[int]:
        cached = self._role.role.heartbeat().cached
        if cached is None:
            return self.blocks
        if cached.whole:
            self.blocks.clear()
        self.blocks |= set(cached.added)
        self.blocks -= set(cached.removed)
        return self.blocks
