"""A prefill instance beside a decode instance; a test plays scheduler, proxy and store."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from millrace.core.config import Config
from millrace.core.kv.prefix import block_hashes, prefix_root
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.reports import CachedBlocks
from millrace.core.span import Span
from millrace.core.token_events import FinishedPrefill, TokenEvent
from millrace.decode.loop import DecodeRole
from millrace.instance.role import Role, WorkerContext
from millrace.prefill.loop import PrefillRole
from millrace.state.memory_store import MemoryStore
from millrace.transfer.push.send.session import SendSession
from millrace.wire.clients.token_stream import token_events
from millrace.wire.codec.token_events import decode_span
from support.deadlines import eventually
from support.tiny_models import prompt
from support.worker_roles import (
    PROXY,
    LiveRole,
    admit_decode,
    config,
    hub_for,
    live_roles,
    remember,
    run_prefill,
    spec,
)

SETTINGS = config(max_chunk_tokens=64)
BLOCK = 64
SHARING = config(max_chunk_tokens=256, max_batch=4)  # of tests of prefixes


class GatedStore(MemoryStore):
    """Hands prompts out when `gate` is open; raises `error` if there is one."""

    def __init__(self) -> None:
        super().__init__(SETTINGS.store)
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.asked: list[str] = []  # for prompts, before the gate
        self.read: list[str] = []
        self.slices: list[tuple[str, int, int]] = []  # what was read of a prompt

    async def prompt_ids(self, request_id: str, start: int = 0, stop: int | None = None) -> Any:
        self.asked.append(request_id)
        await self.gate.wait()
        self.read.append(request_id)
        if self.error is not None:
            raise self.error
        ids = await super().prompt_ids(request_id, start, stop)
        self.slices.append((request_id, start, start + len(ids)))
        return ids


class Proxy:
    """The proxy of an instance that decodes: the tokens that it hears, by (request, choice)."""

    def __init__(self, instance: LiveRole) -> None:
        self.instance = instance
        self.events: list[TokenEvent] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}  # why each ended

    async def listen(self) -> None:
        address, life = self.instance.address, self.instance.incarnation
        async for batch in token_events(address, proxy=PROXY, decode=life):
            for event in batch.events:
                self._take(event)

    def _take(self, event: TokenEvent) -> None:
        key = (event.request_id, event.choice)
        self.events.append(event)
        self.tokens.setdefault(key, []).extend(event.token_ids)
        if event.finish_reason:
            self.ends[key] = event.finish_reason

    async def answered(self, request_id: str) -> list[int]:
        """Returns all tokens of choice 0, once the proxy has its end."""
        await eventually(lambda: (request_id, 0) in self.ends)
        return self.tokens[request_id, 0]

    def spans(self, request_id: str) -> list[Span]:
        mine = [event for event in self.events if event.request_id == request_id]
        return [decode_span(one) for event in mine for one in event.detail().spans]

    def span(self, request_id: str, name: str) -> Span:
        return next(span for span in self.spans(request_id) if span.name == name)

    def cached(self, request_id: str) -> int:
        """Returns the tokens of the prompt that were cached, as its first token says."""
        key = (request_id, 0)
        first = next(event for event in self.events if (event.request_id, event.choice) == key)
        return first.detail().cached_tokens

    @property
    def used_pages(self) -> int:
        """Returns the pages of requests, without those that the instance takes for itself."""
        return self.instance.engine.pool.used_pages - self.instance.role.num_spill_pages


@asynccontextmanager
async def listening(proxy: Proxy) -> AsyncIterator[None]:
    """The proxy listens during the block."""
    reading = asyncio.create_task(proxy.listen())
    try:
        yield
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


class Pair(Proxy):
    """Both instances, and the proxy of the decode instance."""

    def __init__(self, store: GatedStore, prefill: LiveRole, decode: LiveRole) -> None:
        super().__init__(decode)
        self.store, self.prefill, self.decode = store, prefill, decode

    async def request(self, name: str, ids: list[int], **sampling: Any) -> RequestSpec:
        """Makes a request that names the blocks of its prompt, which lies in the store."""
        request = with_blocks(spec(name, len(ids), **sampling), ids)
        await remember(self.store, request, ids)
        return request

    def send(self, request: RequestSpec, kept: int = 0) -> None:
        """Plays the scheduler; decode is to begin with `kept` tokens of its cache."""
        self.decode.role.on_command(admit_decode(request, kept_tokens=kept))
        run = run_prefill(request, self.decode.member, start_token=kept)
        self.prefill.role.on_command(run)

    async def answer(self, name: str, ids: list[int], kept: int = 0, **sampling: Any) -> list[int]:
        """Returns the tokens of choice 0, when nothing is held of the request any more."""
        self.send(await self.request(name, ids, **sampling), kept)
        await self.over(name)
        return self.tokens[name, 0]

    async def over(self, name: str) -> None:
        await self.decode.said("request_finished", name)
        await self.prefill.said("request_released", name)
        await self.answered(name)

    async def admit(self, request_id: str, tokens: int, **sampling: Any) -> RequestSpec:
        """Has decode expect a prompt of any tokens, without blocks."""
        request = spec(request_id, tokens, **sampling)
        await remember(self.store, request, prompt(tokens))
        self.decode.role.on_command(admit_decode(request))
        return request

    async def ask(
        self, request_id: str, tokens: int, *, admit: bool = True, **sampling: Any
    ) -> None:
        """Has decode expect such a prompt, unless `admit` is False, and prefill compute it."""
        request = spec(request_id, tokens, **sampling)
        await remember(self.store, request, prompt(tokens))
        if admit:
            self.decode.role.on_command(admit_decode(request))
        self.prefill.role.on_command(run_prefill(request, self.decode.member))

    def started(self) -> list[str]:
        """Lists the requests whose computation began, in order."""
        return [m.request_id for kind, m in self.prefill.messages if kind == "chunk_started"]

    def computed(self, name: str) -> list[tuple[int, int]]:
        """Lists (history, tokens) of each pass of a request at prefill."""
        passes = [s.attributes for s in self.spans(name) if s.name.startswith("chunk")]
        return [(int(s["history"]), int(s["tokens"])) for s in passes]


@asynccontextmanager
async def live_pair(
    prefill: Config,
    decode: Config | None = None,
    *,
    model: str = "llama",
    build: Callable[[WorkerContext], Role] = DecodeRole,
) -> AsyncIterator[Pair]:
    """Both at work, and the proxy. `decode`: settings of its own; `build` makes its role."""
    store = GatedStore()
    shared: dict[str, Any] = {
        "hub": hub_for(prefill, decode or prefill),
        "store": store,
        "model": model,
    }
    first = LiveRole(PrefillRole, prefill, name="prefill-0", **shared)
    second = LiveRole(build, decode or prefill, name="decode-0", **shared)
    async with live_roles(first, second):
        pair = Pair(store, first, second)
        async with listening(pair):
            yield pair


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


class CacheView:
    """The blocks of a role's cache by its reports, put together as the scheduler does."""

    def __init__(self, role: LiveRole) -> None:
        self._role = role
        self._heard = 0  # of `role.cached`
        self.blocks: set[int] = set()

    def hear(self, *, beats: bool = True) -> set[int]:
        """Takes the reports since the last call, and those of the next heartbeat if one `beats`."""
        for report in self._role.cached[self._heard :]:
            self._take(report)
        self._heard = len(self._role.cached)
        if beats and (cached := self._role.role.cached_blocks()) is not None:
            self._take(cached)
        return self.blocks

    def _take(self, cached: CachedBlocks) -> None:
        if cached.whole:
            self.blocks.clear()
        self.blocks |= set(cached.added)
        self.blocks -= set(cached.removed)


def finished_messages(monkeypatch: pytest.MonkeyPatch) -> dict[str, FinishedPrefill]:
    """Keeps the final message that prefill sends with each request, by request, from now on."""
    found: dict[str, FinishedPrefill] = {}
    finish = SendSession.finish

    async def noted(session: SendSession, message: FinishedPrefill | None) -> None:
        if message is not None:
            found[session.ticket.request_id] = message
        await finish(session, message)

    monkeypatch.setattr(SendSession, "finish", noted)
    return found
