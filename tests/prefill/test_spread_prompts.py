"""Prompts whose KV a prefill instance or SP group sends in shards to a KV owner and KVP workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import pytest_asyncio

from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.transfer import HandshakeAsk, HandshakeGrant
from millrace.core.request import Chunk
from millrace.core.scheduler.commands import KvShard, Member, RunPrefill
from millrace.prefill.loop import PrefillRole
from millrace.prefill.sending import targets
from millrace.wire.clients.kv_peer import KvPeers
from support.deadlines import eventually
from support.kv_holders import Holder, holders
from support.memory_transport import MemoryHub
from support.role_pair import SETTINGS, GatedStore
from support.tiny_models import prompt
from support.worker_roles import LiveRole, live_roles, remember, spec


@dataclass
class Fleet:
    store: GatedStore
    prefills: list[LiveRole]
    holders: list[Holder]

    async def ask(
        self,
        request_id: str,
        chunks: Sequence[tuple[int, Sequence[int]]],
        cuts: Sequence[int] = (),
        admitted: int | None = None,
    ) -> None:
        """Sends a prompt of chunks (tokens, prefill instances); its shards end at the cuts.

        The first `admitted` receivers expect their shards; None: all.
        """
        tokens = sum(count for count, _ in chunks)
        request = spec(request_id, tokens)
        await remember(self.store, request, prompt(tokens))
        shards = []
        for number, (start, end) in enumerate(pairwise([0, *cuts])):
            holder = self.holders[number]
            if start < tokens and (admitted is None or number < admitted):
                holder.admit(request_id, tokens, (start, min(end, tokens)))
            shards.append(KvShard(worker=holder.member, start_token=start, end_token=end))
        if not cuts:
            self.holders[0].admit(request_id, tokens)
        made, start = [], 0
        for index, (count, group) in enumerate(chunks):
            ids = tuple(self.prefills[i].incarnation.id for i in group)
            made.append(Chunk(index=index, start_token=start, num_tokens=count, instance_ids=ids))
            start += count
        members = [self.prefills[i] for i in chunks[-1][1]]
        run = RunPrefill(
            request=request,
            chunks=tuple(made),
            decode=self.holders[0].member,
            group=tuple(one.member for one in members),
            shards=tuple(shards),
        )
        for one in members:
            one.role.on_command(run)


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    store, hub = GatedStore(), MemoryHub()
    prefills = [
        LiveRole(PrefillRole, SETTINGS, name=f"prefill-{i}", hub=hub, store=store) for i in (0, 1)
    ]
    made = prefills[0].engine.layout
    async with holders(3, hub, made, SETTINGS.transfer) as receiving, live_roles(*prefills):
        yield Fleet(store, prefills, receiving)


@pytest.mark.parametrize(
    "chunks",
    [[(500, [0])], [(100, [1]), (400, [1, 0])]],
    ids=["one instance", "a group that grows"],
)
@pytest.mark.parametrize("cuts", [(130, 137, 900), (499, 500), (600,)])
async def test_the_shards_together_are_the_prompt(fleet: Fleet, chunks, cuts) -> None:
    await fleet.ask("whole", chunks)
    whole = await fleet.holders[0].kv("whole")
    await fleet.ask("r", chunks, cuts)
    held = [one for one, start in zip(fleet.holders, (0, *cuts[:-1]), strict=False) if start < 500]
    assert (np.concatenate([await one.kv("r") for one in held], axis=3) == whole).all()
    for one in held:
        end = one.finished["r"]
        assert bool(end.first_tokens) == bool(end.spans) == (one is held[0])
        assert end.total_chunks == fleet.holders[0].finished["whole"].total_chunks
    assert held[0].finished["r"].first_tokens == fleet.holders[0].finished["whole"].first_tokens
    to = next(s for s in held[0].finished["r"].spans if s.name == "kv_transfer").attributes["to"]
    assert to == ", ".join(one.life.id for one in held)
    for role in (fleet.prefills[i] for i in chunks[-1][1]):
        assert (await role.said("request_released", "r")).complete


@pytest.mark.parametrize(
    ("chunks", "leader"),
    [([(500, [0])], 0), ([(100, [1]), (400, [1, 0])], 1)],
    ids=["one instance", "a group that grows"],
)
async def test_passes_of_spread_prompts_are_reported(fleet: Fleet, chunks, leader) -> None:
    """No decode instance has a prefix of such a prompt to tell of."""
    await fleet.ask("whole", chunks)
    await fleet.holders[0].kv("whole")
    await fleet.ask("r", chunks, (130, 137, 900))
    lead, other = fleet.prefills[leader], fleet.prefills[1 - leader]
    assert (await lead.said("request_released", "r")).complete
    told = [said for kind, said in lead.messages if kind == "prompt_advanced"]
    assert {one.request_id for one in told} == {"r"} and {one.attempt for one in told} == {1}
    tokens = [one.tokens for one in told]
    assert len(tokens) > 2 and tokens == sorted(set(tokens)) and max(tokens) < 500
    assert not [kind for kind, _ in other.messages if kind == "prompt_advanced"]


async def test_a_shard_that_is_refused_fails_the_prompt_before_token_one(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, refusing = fleet.holders[0].manager, fleet.holders[1].manager
    handshake = refusing.handshake

    async def late(ask: HandshakeAsk, wait_s: float) -> HandshakeGrant:
        await eventually(lambda: other.num_leases)  # it knows its sender, which gives up then
        return await handshake(ask, wait_s)

    monkeypatch.setattr(refusing, "handshake", late)
    life = fleet.holders[1].life
    fleet.holders[1].life = life._replace(generation=life.generation + 1)
    await fleet.ask("r", [(500, [0])], (130, 500))
    failed = await fleet.prefills[0].said("request_failed", "r")
    assert failed.retryable and "stale receiver" in failed.message
    assert not (await fleet.prefills[0].said("request_released", "r")).complete
    assert "gave the transfer up" in await fleet.holders[0].failed("r")
    assert "r" not in fleet.holders[0].finished


async def test_cancelled_while_a_holder_is_not_there_yet(fleet: Fleet) -> None:
    await fleet.ask("r", [(100, [0])], (60, 100), admitted=1)
    await fleet.prefills[0].said("chunk_finished", "r")
    assert "r" not in fleet.holders[0].finished
    await eventually(lambda: fleet.holders[0].manager.num_leases)  # it knows its sender
    fleet.prefills[0].cancel("r")
    assert not (await fleet.prefills[0].said("request_released", "r")).complete
    assert "gave the transfer up" in await fleet.holders[0].failed("r")


@pytest.mark.parametrize(
    ("shards", "pattern"),
    [
        ([("a", 0, 40)], "its shards end at token 40 of 50"),
        ([("a", 0, 40), ("b", 41, 60)], r"a shard is tokens 41\.\.59; it must begin at token 40"),
        ([("a", 0, 40), ("b", 40, 40)], r"a shard is tokens 40\.\.39"),
        ([("b", 0, 60)], "its first shard is at b, its KV owner is a"),
    ],
)
async def test_shards_that_are_not_the_prompt_are_refused(shards, pattern) -> None:
    peers = KvPeers()
    members = {
        name: Member(incarnation=Incarnation(name, 1), address="127.0.0.1:1") for name in ("a", "b")
    }
    command = RunPrefill(
        request=spec("r", 50),
        chunks=(),
        decode=members["a"],
        shards=tuple(
            KvShard(worker=members[name], start_token=start, end_token=end)
            for name, start, end in shards
        ),
    )
    with pytest.raises(TransferError, match=pattern):
        targets(command, peers, leads=True)
    await peers.close()
