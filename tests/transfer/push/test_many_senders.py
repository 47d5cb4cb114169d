"""Many senders of one request, and attempts that continue from landed tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from concurrent.futures import Future

import numpy as np
import pytest
import pytest_asyncio

from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.sp_layout import Run
from millrace.core.kv.transfer import HandshakeRefused, HistoryAsk, Ticket
from millrace.transfer.ring.messages import RING_CHANNEL, RingMessage
from support.deadlines import HANG_S, eventually
from support.kv_group import RECEIVER, KvGroup, Member, planned
from support.kv_nodes import expected_kv, layout

#: Only a hang takes as long as these leases and timeouts.
CONFIG = TransferConfig(lease_s=30.0, transfer_timeout_s=60.0, handshake_timeout_s=60.0)
BUFFERED = dataclasses.replace(CONFIG, buffer_bytes=16 << 10, backends=1)
NAMES = ("a", "b", "c", "d")


def whole(tokens: int) -> list[Run]:
    return [Run(0, tokens, 0)]


@pytest_asyncio.fixture
async def build() -> AsyncIterator:
    made = []

    def build(config=CONFIG, decode=None, member=None) -> KvGroup:
        member = member or layout(page_tokens=4, pages=96)
        made.append(KvGroup(config, decode or layout(page_tokens=16), dict.fromkeys(NAMES, member)))
        return made[-1]

    yield build
    for group in made:
        await group.close()


@pytest.mark.parametrize("config", [CONFIG, BUFFERED], ids=["buffer-free", "buffered"])
@pytest.mark.parametrize(("parts", "theirs"), [(1, 1), (2, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("page_tokens", [4, 24])
async def test_the_shares_of_all_members_make_the_prompt(build, config, parts, theirs, page_tokens):
    """Groups that grow, tensor-parallel pools on both sides, pages of other sizes."""
    member = dataclasses.replace(layout(page_tokens=4, pages=96), parts=parts)
    decode = dataclasses.replace(layout(page_tokens=page_tokens), parts=theirs)
    group = build(config, decode, member)
    chunks = [(30, NAMES[:1]), (41, NAMES[:3]), (50, NAMES), (2, NAMES)]
    kv, laid = expected_kv(decode, 1, 123), planned(chunks, 4)
    pages = group.admit("r", 123)
    sending = group.start("r", laid, kv)
    assert await group.event("r") == ("landed",)
    await asyncio.gather(*sending)
    assert group.holds(pages, whole(123), kv)
    await group.release("r", pages)


async def test_a_member_that_is_done_early_may_go(build):
    """Its lease ends with it; the others continue, and its end is not a failure."""
    group = build()
    kv, laid = expected_kv(group.layout, 1, 96), planned([(96, NAMES[:2])], 4)
    pages = group.admit("r", 96)
    await group.members["b"].send("r", laid, kv)
    await eventually(lambda: not group.manager.num_leases)
    group.members["b"].die()
    await asyncio.sleep(0.4)  # several times the upkeep
    assert group.events == {}
    await group.members["a"].send("r", laid, kv)
    assert await group.event("r") == ("landed",)
    assert group.holds(pages, whole(96), kv)
    await group.release("r", pages)


async def test_one_write_waits_while_another_moves_and_the_rest_goes_in_a_third(build):
    """Keeps a next write queued at the transport; parts that are ready together are put
    together.
    """
    group = build()
    member = group.members["a"]
    kv = expected_kv(group.layout, 1, 16)
    pages, sent_from = group.admit("r", 16), member.take(4)
    member.fill(sent_from, whole(16), kv)
    member.transport.gate.clear()
    session = await member.manager.open(
        "r",
        peer=member.peer,
        receiver=RECEIVER,
        prompt_tokens=16,
        pages=sent_from,
        runs=whole(16),
    )
    await eventually(lambda: session.timings.granted_s)
    layers, posted = group.layout.num_layers, member.transport.posted
    for layer in range(layers):
        for token in range(16):
            session.layer_ready(0, layer, token, 1)
            await asyncio.sleep(0)  # the session posts what it may
            await asyncio.sleep(0)
            assert len(posted) == min(2, 1 + layer + token)
    member.transport.gate.set()
    await session.finish(1)
    assert await group.event("r") == ("landed",)
    assert len(posted) == 3
    assert group.holds(pages, whole(16), kv)
    member.free.update(sent_from)
    await group.release("r", pages)


async def test_a_member_without_tokens_needs_no_handshake(build):
    """The others may be over before it asks."""
    group = build()
    kv, laid = expected_kv(group.layout, 1, 2), planned([(2, NAMES)], 4)
    assert [bool(laid.computed(name)) for name in NAMES] == [True, True, False, False]
    pages = group.admit("r", 2)
    await asyncio.gather(*group.start("r", laid, kv)[:2])
    assert await group.event("r") == ("landed",)
    await group.release("r", pages)
    await group.members["c"].send("r", laid, kv)


async def test_prefixes_are_told_as_passes_land(build):
    group = build()
    kv = expected_kv(group.layout, 1, 130)
    laid = planned([(30, NAMES[:1]), (100, NAMES[:2])], 4)
    pages = group.admit("r", 130)
    await asyncio.gather(*group.start("r", laid, kv, pause_s=0.01))
    await group.event("r")
    ends = [p.start_token + p.num_tokens for chunk in laid.chunks for p in chunk.passes]
    told = [tokens for _, _, tokens in group.prefixes]
    assert told == sorted(set(told)) and set(told) <= set(ends[:-1])
    await group.release("r", pages)


async def fail_midway(group: KvGroup, kv: np.ndarray) -> tuple[list[int], int]:
    """Attempt 1 on a and b: the first pass lands, then a member that still sends dies.

    Returns the pages and the kept tokens.
    """
    laid = planned([(48, NAMES[:2]), (52, NAMES[:2])], 4)
    pages = group.admit("r", 100)

    dead = []

    def die() -> None:
        group.on_prefix = lambda: None
        dead.append(next(m for m in group.members.values() if m.manager.num_sessions))
        dead[0].die()

    group.on_prefix = die
    sending = group.start("r", laid, kv, pause_s=0.02)
    kind, message, attempt, kept = await group.event("r")
    assert (kind, attempt) == ("failed", 1) and "is gone" in message
    assert kept >= group.prefixes[-1][2] > 0
    for one in sending:
        if one.get_name() == dead[0].name:
            one.cancel()  # it ends with its process
    outcomes = await asyncio.gather(*sending, return_exceptions=True)
    assert any(isinstance(one, TransferError | asyncio.CancelledError) for one in outcomes)
    return pages, kept


@pytest.mark.parametrize("config", [CONFIG, BUFFERED], ids=["buffer-free", "buffered"])
async def test_another_attempt_goes_on_from_what_has_landed(build, config):
    group = build(config)
    kv = expected_kv(group.layout, 1, 100)
    pages, kept = await fail_midway(group, kv)
    group.manager.rewind("r", 2, kept)
    laid = planned([(100 - kept, ("c", "d"))], 4, start=kept)
    await asyncio.gather(*group.start("r", laid, kv, attempt=2))
    assert await group.event("r") == ("landed",)
    assert group.holds(pages, whole(100), kv)
    await group.release("r", pages)


async def test_what_is_not_kept_is_expected_anew(build):
    group = build()
    kv, other = (expected_kv(group.layout, seed, 100) for seed in (1, 2))
    pages, kept = await fail_midway(group, kv)
    group.manager.rewind("r", 2, 13)
    laid = planned([(87, ("c", "d"))], 4, start=13)
    await asyncio.gather(*group.start("r", laid, other, attempt=2))
    assert await group.event("r") == ("landed",)
    assert kept > 13
    assert group.holds(pages, whole(13), kv)
    assert group.holds(pages, [Run(13, 87, 13)], other)
    await group.release("r", pages)


async def test_an_attempt_that_is_over_is_refused_and_a_later_one_waits_for_its_admission(build):
    group = build()
    kv = expected_kv(group.layout, 1, 40)
    pages = group.admit("r", 40)
    laid = planned([(40, ("a",))], 4)
    later = asyncio.create_task(group.members["a"].send("r", laid, kv, attempt=2))
    await asyncio.sleep(0.1)
    assert not later.done()
    group.manager.rewind("r", 2, 0)
    await later
    assert await group.event("r") == ("landed",)
    await group.release("r", pages)

    pages = group.admit("s", 40, attempt=3)
    with pytest.raises(TransferError, match="attempt 2 is over; it is at 3"):
        await group.members["b"].send("s", planned([(40, ("b",))], 4), kv, attempt=2)
    await group.release("s", pages)


async def test_an_attempt_begins_while_the_one_before_still_drains_at_the_same_sender(build):
    """Its writes are of the same request, so they may land; the pages wait for them."""
    group = build()
    member = group.members["a"]
    kv = expected_kv(group.layout, 1, 40)
    laid = planned([(40, ("a",))], 4)
    pages = group.admit("r", 40)
    member.transport.gate.clear()
    stale = asyncio.create_task(member.send("r", laid, kv))
    await eventually(lambda: member.transport.posted)
    group.manager.rewind("r", 2, 0)
    again = asyncio.create_task(member.send("r", laid, kv, attempt=2))
    await asyncio.sleep(0.1)
    assert not again.done()
    member.transport.gate.set()
    await again
    assert await group.event("r") == ("landed",)  # once, of the second attempt
    assert group.holds(pages, whole(40), kv)
    with pytest.raises(TransferError, match=r"stopped the transfer|attempt 1 is over"):
        await stale
    await group.release("r", pages)
    assert group.events["r"].empty()


async def test_an_attempt_that_ends_while_its_sender_connects_holds_no_buffer(build, monkeypatch):
    group = build(BUFFERED)  # one buffer
    kv, laid = expected_kv(group.layout, 1, 40), planned([(40, ("a",))], 4)
    connect, late, asked = group.transport.connect, Future[str](), []

    def connect_late(metadata: bytes) -> Future[str]:
        asked.append(metadata)
        return late if len(asked) == 1 else connect(metadata)

    monkeypatch.setattr(group.transport, "connect", connect_late)
    pages = group.admit("r", 40)
    [stale] = group.start("r", laid, kv)
    await eventually(lambda: asked)
    group.manager.rewind("r", 2, 0)
    late.set_result(connect(asked[0]).result())
    with pytest.raises(TransferError):
        await stale
    await asyncio.gather(*group.start("r", laid, kv, attempt=2))
    assert await group.event("r") == ("landed",)
    assert group.holds(pages, whole(40), kv)
    await group.release("r", pages)


async def test_a_rewind_that_cannot_be(build):
    group = build()
    pages = group.admit("r", 40)
    for request_id, attempt, kept, pattern in (
        ("r", 1, 0, "attempt 1 can't follow attempt 1"),
        ("r", 2, 5, "5 tokens can't be kept: 0 have landed"),
        ("s", 2, 0, "request s is not admitted"),
    ):
        with pytest.raises(TransferError, match=pattern):
            group.manager.rewind(request_id, attempt, kept)
    kv = expected_kv(group.layout, 1, 40)
    await group.members["a"].send("r", planned([(40, ("a",))], 4), kv)
    assert await group.event("r") == ("landed",)
    with pytest.raises(TransferError, match="it has landed"):
        group.manager.rewind("r", 2, 40)
    await group.release("r", pages)


async def test_tokens_of_another_member_fail_the_transfer(build):
    group = build()
    pages = group.admit("r", 40)
    session = await group.members["a"].manager.open(
        "r",
        peer=group.members["a"].peer,
        receiver=RECEIVER,
        prompt_tokens=40,
        pages=[0, 1],
        runs=[Run(8, 4, 0), Run(20, 4, 4)],
    )
    session.layer_ready(0, 0, 8, 5)
    with pytest.raises(TransferError, match="token 12 does not lie in these pages"):
        await session.finish(None)
    await session.abort("the test is over")
    await group.release("r", pages)


# -- history back


def history_ask(group: KvGroup, runs: list[Run], attempt: int = 2) -> HistoryAsk:
    member = group.members["c"]
    return HistoryAsk(
        ticket=Ticket(
            request_id="r",
            sender=Incarnation("c", 5),
            receiver=Incarnation(*RECEIVER),
            attempt=attempt,
        ),
        layout=member.layout,
        pages=[9, 3, 7, 8, 1],
        runs=runs,
        agent_metadata=member.transport.metadata(),
    )


@pytest.mark.parametrize(("parts", "theirs"), [(1, 1), (2, 4)])
async def test_history_comes_back_layer_by_layer(build, parts, theirs):
    member = dataclasses.replace(layout(page_tokens=4, pages=96), parts=parts)
    group = build(decode=dataclasses.replace(layout(page_tokens=16), parts=theirs), member=member)
    kv = expected_kv(group.layout, 1, 100)
    arrived: list[int] = []
    asker = group.members["c"]
    asker.transport.subscribe(
        RING_CHANNEL, lambda _, payload: arrived.append(RingMessage.decode(payload).number)
    )
    pages, kept = await fail_midway(group, kv)
    group.manager.rewind("r", 2, kept)
    runs = [Run(0, 5, 0), Run(20, 12, 8)]
    await asker.peer.send_history(history_ask(group, runs), timeout_s=HANG_S)
    await eventually(lambda: len(arrived) == group.layout.num_layers)
    assert arrived == list(range(group.layout.num_layers))
    assert asker.holds([9, 3, 7, 8, 1], runs, kv)
    await group.release("r", pages)


async def test_history_that_has_not_landed_is_refused(build):
    group = build()
    pages, kept = await fail_midway(group, expected_kv(group.layout, 1, 100))
    ask = group.members["c"].peer.send_history
    with pytest.raises(HandshakeRefused, match="not admitted here for attempt 2"):
        await ask(history_ask(group, [Run(0, 4, 0)]), timeout_s=0.05)
    group.manager.rewind("r", 2, kept)
    refused = (
        ([Run(0, 4, 0), Run(kept, 1, 4)], 2, f"first {kept + 1} tokens, {kept} have landed"),
        ([Run(0, 4, 18)], 2, "leaves the 5 pages"),
        ([Run(0, 4, 0)], 1, "attempt 1 is over"),
    )
    for runs, attempt, pattern in refused:
        with pytest.raises(HandshakeRefused, match=pattern):
            await ask(history_ask(group, runs, attempt), timeout_s=0.05)
    stale = dataclasses.replace(
        history_ask(group, []), layout=dataclasses.replace(group.layout, model_hash="model-b")
    )
    with pytest.raises(HandshakeRefused, match="model_hash differs"):
        await ask(stale, timeout_s=0.05)
    await group.release("r", pages)


async def test_pages_are_kept_while_history_is_read_from_them(build):
    group = build()
    kv = expected_kv(group.layout, 1, 100)
    asker = group.members["c"]
    asker.transport.subscribe(RING_CHANNEL, lambda *_: None)
    pages, kept = await fail_midway(group, kv)
    group.manager.rewind("r", 2, kept)
    group.transport.gate.clear()
    await asker.peer.send_history(history_ask(group, [Run(0, 12, 0)]), timeout_s=HANG_S)
    release = asyncio.create_task(group.release("r", pages))
    await asyncio.sleep(0.3)
    assert not release.done()
    group.transport.gate.set()
    async with asyncio.timeout(HANG_S):
        await release


# -- many at once


@dataclasses.dataclass
class Storm:
    """Requests of 1 to 4 senders each, one of which dies midway; a scheduler that tries again."""

    group: KvGroup
    rng: random.Random
    dead: set[str] = dataclasses.field(default_factory=set)
    sending: list[tuple[str, int, list[asyncio.Task]]] = dataclasses.field(default_factory=list)

    async def request(self, number: int) -> None:
        tokens = self.rng.randint(5, 120)
        kv = expected_kv(self.group.layout, number, tokens)
        name = f"r{number}"
        await asyncio.sleep(self.rng.uniform(0, 0.5))
        pages, attempt, kept = self.group.admit(name, tokens), 1, 0
        given_up: list[asyncio.Task] = []
        while True:
            sending = self.start(name, kv, attempt, kept)
            if (found := await self.failure(name, attempt)) is None:
                break
            for task in sending:
                task.cancel()
            given_up += sending
            kept, attempt = self.rng.choice([found, found // 2]), attempt + 1
            self.group.manager.rewind(name, attempt, kept)
        assert self.group.holds(pages, whole(tokens), kv)
        await self.group.release(name, pages)
        await asyncio.gather(*sending)
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*given_up, return_exceptions=True)

    async def failure(self, name: str, attempt: int) -> int | None:
        """Returns the kept tokens once the attempt has failed; None once it has landed."""
        while True:
            outcome, *failure = await self.group.event(name, timeout_s=2 * HANG_S)
            if name in self.group.landed:
                return None
            assert outcome == "failed"
            _, failed, kept = failure
            assert failed <= attempt
            if failed == attempt:
                return kept  # else both the scheduler and the receiver have noticed

    def start(self, name: str, kv: np.ndarray, attempt: int, kept: int) -> list[asyncio.Task]:
        alive = [name for name in NAMES if name not in self.dead]
        members = self.rng.sample(alive, self.rng.randint(1, len(alive)))
        cut = self.rng.randint(1, kv.shape[3] - kept)
        first = members[: self.rng.randint(1, len(members))]
        chunks = [(cut, first), (kv.shape[3] - kept - cut, members)]
        laid = planned([c for c in chunks if c[0]], 4, start=kept)
        tasks = self.group.start(name, laid, kv, attempt=attempt, pause_s=0.01)
        self.sending.append((name, attempt, tasks))
        return tasks

    @staticmethod
    def has_queued(member: Member) -> bool:
        return any(not write.running() and not write.done() for write in member.transport.posted)

    async def kill(self, name: str) -> None:
        """Kills a member with a write that is queued and never lands.

        The member's writes are delayed until one is queued, so that its death hits a request on any
        machine. The receiver may not have noticed yet: the scheduler gives its attempts up.
        """
        member = self.group.members[name]
        member.transport.gate.clear()
        await eventually(lambda: self.has_queued(member))
        member.transport.gate.set()
        self.dead.add(name)
        member.die()
        hit = 0
        for request_id, attempt, tasks in self.sending:
            if any(task.get_name() == name and not task.done() for task in tasks):
                self.group.say(request_id, "failed", f"{name} is gone", attempt, 0)
                hit += 1
        assert hit, f"nobody was hit by the death of {name}"


async def storm(group: KvGroup, requests: int, seed: int) -> None:
    made = Storm(group, random.Random(seed))
    for member in group.members.values():
        member.transport.delay_s = 0.004
    async with asyncio.TaskGroup() as tasks:
        for number in range(requests):
            tasks.create_task(made.request(number))
        tasks.create_task(made.kill("c"))


@pytest.mark.parametrize("backends", [0, 1, 3])
async def test_many_requests_of_many_senders_one_of_whom_dies(build, backends):
    """Every request is served, every byte is right, and nothing leaks."""
    config = dataclasses.replace(BUFFERED, backends=backends) if backends else CONFIG
    await storm(build(config, layout(pages=256), layout(page_tokens=4, pages=800)), 20, backends)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
async def test_many_more_of_them(build, seed):
    config = dataclasses.replace(BUFFERED, backends=1 + seed % 3) if seed % 4 else CONFIG
    await storm(build(config, layout(pages=900), layout(page_tokens=4, pages=3000)), 100, seed)
