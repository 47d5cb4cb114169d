"""A decode instance beside a prefill instance; a test plays scheduler and proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from millrace.core.config import Config
from millrace.core.token_events import TokenEvent
from millrace.decode.loop import DecodeRole
from millrace.prefill.loop import PrefillRole
from millrace.state.memory_store import MemoryStore
from millrace.state.store import StoreError
from millrace.transfer.transport.memory import MemoryHub
from millrace.wire.clients.token_stream import token_events
from support.tiny_models import prompt
from support.worker_roles import (
    PROXY,
    LiveRole,
    admit_decode,
    live_roles,
    remember,
    run_prefill,
    spec,
)


class BrokenStore(MemoryStore):
    """Raises `error`, if there is one, where decode reads a prompt."""

    error: StoreError | None = None

    async def prompt_ids(self, request_id: str, start: int = 0, stop: int | None = None) -> Any:
        if self.error is not None:
            raise self.error
        return await super().prompt_ids(request_id, start, stop)


@dataclass
class Pair:
    store: BrokenStore
    prefill: LiveRole
    decode: LiveRole
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    spans: dict[str, list[str]] = field(default_factory=dict)

    async def admit(self, request_id: str, tokens: int, **sampling: Any) -> Any:
        request = spec(request_id, tokens, **sampling)
        await remember(self.store, request, prompt(tokens))
        self.decode.role.on_command(admit_decode(request))
        return request

    async def ask(self, request_id: str, tokens: int, **sampling: Any) -> None:
        request = await self.admit(request_id, tokens, **sampling)
        self.prefill.role.on_command(run_prefill(request, self.decode.member))

    async def read_tokens(self) -> None:
        """Plays the proxy."""
        address, life = self.decode.address, self.decode.incarnation
        async for events in token_events(address, proxy=PROXY, decode=life):
            for event in events:
                self.take(event)

    def take(self, event: TokenEvent) -> None:
        key = (event.request_id, event.choice)
        self.tokens.setdefault(key, []).extend(event.token_ids)
        self.spans.setdefault(event.request_id, []).extend(s.name for s in event.detail().spans)
        if event.finish_reason:
            self.ends[key] = event.finish_reason
            self.errors[event.request_id] = event.detail().error

    @property
    def used_pages(self) -> int:
        """Beside what the instance takes for itself."""
        return self.decode.engine.pool.used_pages - self.decode.role.num_spill_pages


@asynccontextmanager
async def live_pair(prefill: Config, decode: Config) -> AsyncIterator[Pair]:
    """Both at work, and the proxy."""
    store, hub = BrokenStore(decode.store), MemoryHub()
    first = LiveRole(PrefillRole, prefill, name="prefill-0", hub=hub, store=store)
    second = LiveRole(DecodeRole, decode, name="decode-0", hub=hub, store=store)
    async with live_roles(first, second):
        made = Pair(store, first, second)
        reader = asyncio.create_task(made.read_tokens())
        yield made
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
