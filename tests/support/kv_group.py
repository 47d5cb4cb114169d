"""Several prefill-like senders and one decode-like receiver in this process, over memory.

Each request is laid out over a group; every member sends the share that it would have computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence

import numpy as np

from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import Layout, Run
from millrace.core.kv.sp_layout import layout as lay_out
from millrace.core.request import Chunk
from millrace.transfer.push.control import ReceiveCallbacks
from millrace.transfer.push.receive.manager import ReceiveManager
from millrace.transfer.push.send.manager import SendSession
from support.deadlines import HANG_S, eventually
from support.kv_nodes import KvReceiver, KvSender
from support.memory_transport import MemoryHub
from support.slow_transport import SlowTransport

RECEIVER = ("decode-0", 7)
MAX_CHUNK_TOKENS = 24


class LocalPeer:
    """The receiver's control side without a wire; it ignores senders that are not `alive`.

    The content of `finish` is the number of passes, or has it as `passes`.
    """

    def __init__(self, manager: ReceiveManager) -> None:
        self.manager = manager
        self.alive = True

    def check(self) -> None:
        if not self.alive:
            raise TransferError("this process has ended")

    async def handshake(self, ask, *, timeout_s):
        self.check()
        return await self.manager.handshake(ask, 0.9 * timeout_s)

    async def finish(self, ticket, message, *, timeout_s):
        self.check()
        passes = getattr(message, "passes", message)
        refusal = await self.manager.finish(
            ticket, total_chunks=passes, message=message, wait_s=timeout_s
        )
        if refusal:
            raise TransferError(refusal)

    async def abort(self, ticket, *, reason, drained, timeout_s):
        self.check()
        self.manager.abort(ticket, reason=reason, drained=drained)

    async def send_history(self, ask, *, timeout_s):
        self.check()
        await self.manager.send_history(ask, timeout_s)


class Member(KvSender):
    """The sending side of a prefill instance."""

    def __init__(
        self, name: str, hub: MemoryHub, made: KvLayout, config: TransferConfig, peer: LocalPeer
    ) -> None:
        super().__init__((name, 5), SlowTransport(name, hub), made, config)
        self.name = name
        self.peer = peer

    async def send(
        self, request_id: str, laid: Layout, kv: np.ndarray, *, attempt: int = 1, pause_s=0.0
    ) -> None:
        """Sends its share, pass by pass. Raises TransferError after giving up."""
        passes = passes_of(laid, self.name)
        pages = self.take(laid.pages[self.name])
        runs = laid.computed(self.name)
        self.fill(pages, runs, kv)
        session = await self.manager.open(
            request_id,
            peer=self.peer,
            receiver=RECEIVER,
            prompt_tokens=kv.shape[3],
            pages=pages,
            attempt=attempt,
            runs=runs,
        )
        try:
            await self._compute(session, passes, pause_s)
            await session.finish(laid.total_passes() if laid.members[0] == self.name else None)
        except (TransferError, asyncio.CancelledError) as error:
            await self._give_up(session, str(error) or "cancelled")
            raise
        finally:
            self.free.update(pages)

    async def _give_up(self, session: SendSession, reason: str) -> None:
        """Runs to the end, as prefill does: pages are free once nothing is in flight."""
        ending = asyncio.create_task(session.abort(reason))
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(ending)

    async def _compute(self, session: SendSession, passes, pause_s: float) -> None:
        for number, runs in passes:
            for layer in range(self.layout.num_layers):
                for run in runs:
                    session.layer_ready(number, layer, run.start_token, run.num_tokens)
                if pause_s:
                    await asyncio.sleep(random.uniform(0, pause_s))
                if session.failure is not None:
                    raise session.failure

    def die(self) -> None:
        """Ends like a process: none of its writes or messages arrives any more."""
        self.peer.alive = False
        self.transport.close()


class KvGroup(KvReceiver):
    """The receiver with its pages, and `members` by name. Call `close` at the end."""

    def __init__(
        self, config: TransferConfig, made: KvLayout, members: dict[str, KvLayout]
    ) -> None:
        hub = MemoryHub()
        callbacks = ReceiveCallbacks(
            on_first_tokens=lambda i, message: None,
            on_landed=self._landed,
            on_prefix=self._prefix_landed,
            on_failed=lambda i, *failure: self.say(i, "failed", *failure),
        )
        super().__init__(RECEIVER, SlowTransport("decode-0", hub), made, config, callbacks)
        self.events: dict[str, asyncio.Queue[tuple]] = {}
        self.landed: set[str] = set()
        self.prefixes: list[tuple[str, int, int]] = []
        self.on_prefix: Callable[[], None] = lambda: None
        self.members = {
            name: Member(name, hub, layout, config, LocalPeer(self.manager))
            for name, layout in members.items()
        }

    def _landed(self, request_id: str) -> None:
        self.landed.add(request_id)
        self.say(request_id, "landed")

    def _prefix_landed(self, *prefix) -> None:
        self.prefixes.append(prefix)
        self.on_prefix()

    def say(self, request_id: str, *event: object) -> None:
        self.events.setdefault(request_id, asyncio.Queue()).put_nowait(event)

    async def event(self, request_id: str, timeout_s: float = HANG_S) -> tuple:
        async with asyncio.timeout(timeout_s):
            return await self.events.setdefault(request_id, asyncio.Queue()).get()

    def admit(self, request_id: str, tokens: int, attempt: int = 1) -> list[int]:
        pages = self.take(self.layout.pages_for(tokens))
        self.manager.admit(request_id, pages, tokens, attempt)
        return pages

    def start(
        self, request_id: str, laid: Layout, kv: np.ndarray, **options
    ) -> list[asyncio.Task[None]]:
        """All members of the group send."""
        return [
            asyncio.create_task(self.members[name].send(request_id, laid, kv, **options), name=name)
            for name in laid.members
        ]

    async def release(self, request_id: str, pages: list[int]) -> None:
        await self.manager.release(request_id)
        self.free.update(pages)

    async def close(self) -> None:
        await eventually(lambda: not self.manager.num_leases)
        assert len(self.free) == self.layout.num_pages
        for member in self.members.values():
            await member.close()
        await super().close()


def planned(
    chunks: Sequence[tuple[int, Sequence[str]]], page_tokens: int, start: int = 0
) -> Layout:
    """A request of chunks (tokens, group) over members with pages of `page_tokens`."""
    made = []
    for index, (tokens, group) in enumerate(chunks):
        made.append(
            Chunk(index=index, start_token=start, num_tokens=tokens, instance_ids=tuple(group))
        )
        start += tokens
    return lay_out(made, page_tokens, MAX_CHUNK_TOKENS)


def passes_of(laid: Layout, name: str) -> list[tuple[int, tuple[Run, ...]]]:
    """Yields (number, the member's computation) of each pass."""
    return [
        (one.number, one.runs[chunk.group.index(name)] if name in chunk.group else ())
        for chunk in laid.chunks
        for one in chunk.passes
    ]
