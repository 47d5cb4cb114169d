"""Any number of senders and of receivers of one prompt, in this process, over memory.

Senders and receivers each have some layers, heads and tokens of the prompt; pages may have any size
on both sides.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from millrace.core.config import TransferConfig
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import Run
from millrace.transfer.push.control import ReceiveCallbacks, Target
from millrace.transfer.push.send.manager import SpreadSession
from millrace.transfer.transport.layout import shared_heads
from support.deadlines import HANG_S
from support.kv_group import LocalPeer
from support.kv_nodes import KvReceiver, KvSender
from support.memory_transport import MemoryHub
from support.slow_transport import SlowTransport

CONFIG = TransferConfig(lease_s=HANG_S, transfer_timeout_s=HANG_S, handshake_timeout_s=HANG_S)


@dataclass(frozen=True)
class End:
    """The content of `finish`: the number of passes, and the first token for the KV owner."""

    passes: int
    token: int | None = None


def without_token(end: End) -> End:
    return dataclasses.replace(end, token=None)


class Receiver(KvReceiver):
    """A receiver. `events` lists the calls of its callbacks."""

    def __init__(
        self, name: str, hub: MemoryHub, made: KvLayout, config: TransferConfig = CONFIG
    ) -> None:
        self.events: asyncio.Queue[tuple] = asyncio.Queue()
        said = self.events.put_nowait
        callbacks = ReceiveCallbacks(
            on_first_tokens=lambda i, end: said(("finished", end.token)),
            on_landed=lambda i: said(("landed",)),
            on_prefix=lambda i, attempt, tokens: said(("prefix", tokens)),
            on_failed=lambda i, *failure: said(("failed", *failure)),
        )
        super().__init__((name, 7), SlowTransport(name, hub), made, config, callbacks)
        self.peer = LocalPeer(self.manager)
        self.shard = (0, 0)
        self.pages: list[int] = []

    def admit(self, tokens: int, shard: tuple[int, int] | None, **options: int) -> None:
        """Expects the shard of request r, a prompt of `tokens`; None: all of it."""
        self.shard = shard or (0, tokens)
        self.pages = self.take(self.layout.pages_for(self.shard[1] - self.shard[0]))
        self.manager.admit("r", self.pages, tokens, shard=shard, **options)

    def target(self, *, final_message=None, **changed: object) -> Target:
        made = Target(
            peer=self.peer,
            receiver=self.identity,
            start_token=self.shard[0],
            end_token=self.shard[1],
            layers=self.layout.layers,
            final_message=final_message,
        )
        return dataclasses.replace(made, **changed)

    def has(self, kv: np.ndarray) -> bool:
        """Returns whether its shard's pages equal kv of the whole prompt and model."""
        start, end = self.shard
        return self.holds(self.pages, [Run(start, end - start, 0)], kv)

    async def event(self, timeout_s: float = HANG_S) -> tuple:
        async with asyncio.timeout(timeout_s):
            return await self.events.get()

    async def outcome(self) -> tuple:
        """Waits for the first event that is neither a finish nor a prefix."""
        while (event := await self.event())[0] not in ("landed", "failed"):
            pass
        return event

    async def release(self) -> None:
        await self.manager.release("r")
        self.free.update(self.pages)
        self.pages = []

    async def close(self) -> None:
        """Raises IntegrityError when anything was left behind."""
        if self.pages:
            await self.release()
        await super().close()


class Sender(KvSender):
    """Makes a sender of `runs` of the prompt, in any order of its slots; None: all of it."""

    def __init__(
        self, name: str, hub: MemoryHub, made: KvLayout, config: TransferConfig = CONFIG
    ) -> None:
        super().__init__((name, 5), SlowTransport(name, hub), made, config)

    async def open(
        self,
        targets: Sequence[Target],
        kv: np.ndarray,
        runs: Sequence[Run] | None = None,
        attempt: int = 1,
    ) -> SpreadSession:
        tokens = kv.shape[3]
        whole = [Run(0, tokens, 0)] if runs is None else list(runs)
        slots = max((run.slot + run.num_tokens for run in whole), default=0)
        pages = self.take(self.layout.pages_for(slots))
        self.fill(pages, whole, kv)
        return await self.manager.open_spread(
            "r", targets, prompt_tokens=tokens, pages=pages, attempt=attempt, runs=runs
        )


def meets(sender: Sender, receiver: Receiver) -> bool:
    """Returns whether both have a layer and a head in common."""
    layers = set(sender.layout.layers) & set(receiver.layout.layers)
    return bool(layers) and shared_heads(sender.layout, receiver.layout) is not None


@asynccontextmanager
async def spread(
    senders: Sequence[KvLayout],
    receivers: Sequence[KvLayout],
    config: TransferConfig = CONFIG,
) -> AsyncIterator[tuple[list[Sender], list[Receiver]]]:
    """Yields all nodes at work; checks for leaks at the end."""
    hub = MemoryHub()
    sending = [Sender(f"prefill-{i}", hub, made, config) for i, made in enumerate(senders)]
    receiving = [Receiver(f"holder-{i}", hub, made, config) for i, made in enumerate(receivers)]
    yield sending, receiving
    for node in (*sending, *receiving):
        await node.close()
