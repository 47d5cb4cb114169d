"""KV of a request between instances whose ranks are processes with an agent of their own each."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from millrace.core.config import TransferConfig
from millrace.core.errors import ConfigError, TransferError
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.transfer import HandshakeRefused
from millrace.instance.shards.shard_table import NOBODY
from millrace.transfer.push.control import ReceiveCallbacks
from millrace.transfer.push.receive.manager import ReceiveManager
from millrace.transfer.push.send.manager import SendManager, SendSession
from support.deadlines import HANG_S, eventually
from support.kv_group import LocalPeer
from support.kv_nodes import expected_kv, layout
from support.rank_agents import RankedInstance

TOKENS = 50
CONFIG = TransferConfig()


def of_degree(ranks: int, *, heads: int = 4, **changes: Any) -> KvLayout:
    parts = min(ranks, heads)
    made = dataclasses.replace(layout(), num_kv_heads=heads, head_count=heads)
    return dataclasses.replace(made, parts=parts, copies=ranks // parts, **changes)


class Pair:
    """A prefill-like and a decode-like instance."""

    def __init__(self, sender: RankedInstance, receiver: RankedInstance) -> None:
        self.sender, self.receiver = sender, receiver
        self.events: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        said = self.events.put_nowait
        self.receives = ReceiveManager(
            transport=receiver.transport,
            layout=receiver.layout,
            storage=receiver.pools[0],
            identity=("decode-0", 7),
            config=CONFIG,
            callbacks=ReceiveCallbacks(
                on_first_tokens=lambda i, message: None,
                on_landed=lambda i: said(("landed", i)),
                on_prefix=lambda i, attempt, tokens: None,
                on_failed=lambda i, message, *kept: said(("failed", i, message)),
            ),
        )
        self.sends = SendManager(
            transport=sender.transport,
            layout=sender.layout,
            storage=sender.pools[0],
            identity=("prefill-0", 5),
            config=CONFIG,
        )

    def pages(self, number: int) -> tuple[list[int], list[int]]:
        """Pages of a prompt on both sides, in no order."""
        ours = [one.layout.pages_for(TOKENS) for one in (self.sender, self.receiver)]
        mine = list(reversed(range(number * ours[0], (number + 1) * ours[0])))
        theirs = list(range(number * ours[1], (number + 1) * ours[1]))
        return mine, theirs[1:] + theirs[:1]

    async def open(self, request_id: str, number: int) -> SendSession:
        mine, theirs = self.pages(number)
        self.receives.admit(request_id, theirs, TOKENS)
        return await self.sends.open(
            request_id,
            peer=LocalPeer(self.receives),
            receiver=("decode-0", 7),
            prompt_tokens=TOKENS,
            pages=mine,
        )

    def ready(self, session: SendSession, chunk: int, start: int, count: int) -> None:
        for layer in range(self.sender.layout.num_layers):
            session.layer_ready(chunk, layer, start, count)

    async def event(self) -> tuple[str, ...]:
        return await asyncio.wait_for(self.events.get(), HANG_S)

    async def close(self) -> None:
        """Raises IntegrityError when anything was left behind."""
        self.sends.check_integrity()
        await eventually(lambda: not self.receives.num_leases)
        self.receives.check_integrity()
        await self.sends.close()
        await self.receives.close()


@asynccontextmanager
async def pair_of(sender: KvLayout, receiver: KvLayout) -> AsyncIterator[Pair]:
    made = await asyncio.gather(
        *(asyncio.to_thread(RankedInstance, one) for one in (sender, receiver))
    )
    pair = Pair(*made)
    try:
        yield pair
        await pair.close()
    finally:
        for one in made:
            await asyncio.to_thread(one.close)


@pytest.mark.parametrize(
    ("ranks", "theirs", "heads"),
    [
        (1, 2, 4),
        (4, 2, 2),
        pytest.param(2, 1, 4, marks=pytest.mark.slow),
        pytest.param(2, 4, 2, marks=pytest.mark.slow),
    ],
)
async def test_prompts_land_whole_at_every_rank(ranks: int, theirs: int, heads: int) -> None:
    """Two prompts at once, in chunks, into pages of another size; four ranks share two heads."""
    ours = of_degree(ranks, heads=heads)
    async with pair_of(ours, of_degree(theirs, heads=heads, page_tokens=8, num_pages=90)) as pair:
        prompts = {f"r{n}": expected_kv(ours, n, TOKENS) for n in range(2)}

        async def send(number: int, name: str) -> None:
            pair.sender.fill(pair.pages(number)[0], prompts[name])
            session = await pair.open(name, number)
            for chunk, (start, count) in enumerate(((0, 30), (30, 20))):
                pair.ready(session, chunk, start, count)
            await session.finish(2)

        await asyncio.gather(*(send(*one) for one in enumerate(prompts)))
        assert {await pair.event() for _ in prompts} == {("landed", name) for name in prompts}
        for number, (name, kv) in enumerate(prompts.items()):
            assert pair.receiver.holds(pair.pages(number)[1], kv)
            await pair.receives.release(name)


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_the_death_of_one_rank_ends_the_whole_transfer(side: str) -> None:
    """Half of a prompt has landed when a rank is killed."""
    async with pair_of(of_degree(2), of_degree(2)) as pair:
        session = await pair.open("r", 0)
        pair.ready(session, 0, 0, 30)
        await eventually(lambda: session.timings.bytes and not session.failure)
        victim = pair.sender if side == "sender" else pair.receiver
        await asyncio.to_thread(victim.signal, 1, signal.SIGKILL)
        pair.ready(session, 1, 30, 20)
        with pytest.raises(TransferError, match="is gone"):
            await asyncio.wait_for(session.finish(2), HANG_S)
        await session.abort("a rank has died")
        assert (await pair.event())[0] == "failed"
        await pair.receives.release("r")


async def test_a_cancelled_prompt_leaves_nothing_behind() -> None:
    async with pair_of(of_degree(2), of_degree(2)) as pair:
        session = await pair.open("r", 0)
        pair.ready(session, 0, 0, 30)
        await session.abort("the client has left")
        await pair.receives.release("r")
        again = await pair.open("again", 0)
        kv = expected_kv(pair.sender.layout, 9, TOKENS)
        pair.sender.fill(pair.pages(0)[0], kv)
        pair.ready(again, 0, 0, TOKENS)
        await again.finish(1)
        while (event := await pair.event()) != ("landed", "again"):
            assert event[0] == "failed"
        assert pair.receiver.holds(pair.pages(0)[1], kv)
        await pair.receives.release("again")


async def test_layouts_that_don_t_fit_are_refused_with_both_values() -> None:
    async with pair_of(of_degree(2), of_degree(2, model_hash="other")) as pair:
        session = await pair.open("r", 0)
        with pytest.raises(HandshakeRefused, match="model_hash differs: the sender has 'model-a'"):
            await session.finish(1)
        await session.abort("refused")
        await pair.receives.release("r")


async def test_staging_buffers_are_refused_for_pools_of_several_ranks() -> None:
    ranks = await asyncio.to_thread(RankedInstance, of_degree(2))
    try:
        with pytest.raises(ConfigError, match=r"transfer\.buffer_bytes is 4096; it must be 0"):
            ReceiveManager(
                transport=ranks.transport,
                layout=ranks.layout,
                storage=ranks.pools[0],
                identity=("decode-0", 1),
                config=TransferConfig(buffer_bytes=4096),
                callbacks=NOBODY,
            )
    finally:
        await asyncio.to_thread(ranks.close)
