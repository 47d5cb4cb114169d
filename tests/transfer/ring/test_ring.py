"""Groups of nodes in one process, over the memory transport: bytes, order, aborts, overlaps."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest

from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.transfer.ring.messages import RingKind, RingMessage
from millrace.transfer.writer import GRACE_S
from support.clocks import given_to
from support.deadlines import HANG_S, eventually
from support.memory_transport import MemoryHub
from support.slow_transport import SlowTransport
from transfer.ring.ring_nodes import RingNode, chunks_of, pool_layout, random_pause

NAMES = ("a", "b", "c", "d")
LEASE_S = 10 * HANG_S  # over when the clock skips it
CONFIG = TransferConfig(lease_s=LEASE_S)


class Nodes:
    """All members in one process."""

    def __init__(self, names=NAMES, **made) -> None:
        hub = MemoryHub()
        self.all = {}
        for number, name in enumerate(names):
            made_here = pool_layout(**{"pages": 200 + 7 * number, **made})
            transport = SlowTransport(name, hub)
            self.all[name] = RingNode(name, transport, made_here, CONFIG)
        for node in self.all.values():
            for other in self.all.values():
                if other is not node:
                    node.transport.connect(other.metadata).result()

    def prepare(self, request_id, chunks, seed, **options):
        jobs, roster = {}, {}
        for name in chunks[-1].instance_ids:
            jobs[name], roster[name] = self.all[name].prepare(request_id, chunks, seed, **options)
        return jobs, roster

    async def run(self, request_id, chunks, seed, pause_s=0.0, **options) -> None:
        """Runs a request from joining to the end, with the members' computes in threads."""
        jobs, roster = self.prepare(request_id, chunks, seed, **options)
        rng = random.Random(seed)

        async def member(name):
            node, job = self.all[name], jobs[name]
            await asyncio.sleep(rng.random() * pause_s)  # others send before it has opened
            node.open(job, roster)
            pause = random_pause(seed + len(name), pause_s)
            assert await asyncio.to_thread(node.compute, job, pause), job.aborted_by
            await job.link.close()
            node.check_share(job)
            node.release(job)

        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*(member(name) for name in jobs))
        assert not [wrong for job in jobs.values() for wrong in job.wrong]

    def check(self) -> None:
        for node in self.all.values():
            node.manager.check_integrity()
            node.check_free()

    def close(self) -> None:
        for node in self.all.values():
            node.transport.close()


@pytest.fixture
def clock(monkeypatch):
    return given_to("millrace.transfer", monkeypatch)


def heard_by(node) -> list[str]:
    """Lists the senders of the messages that the node has taken since."""
    senders, deliver = [], node.transport.deliver

    def noting(sender, payload) -> None:
        deliver(sender, payload)
        senders.append(sender)

    node.transport.deliver = noting
    return senders


@pytest.fixture
def nodes():
    made = Nodes()
    yield made
    made.check()
    made.close()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("pause_s", [0.0, 0.002])
def test_blocks_of_growing_shares_reach_every_member(nodes, size, pause_s):
    chunks = chunks_of([60, 45], [NAMES[:size]] * 2)
    asyncio.run(nodes.run("r", chunks, seed=size, pause_s=pause_s))


@pytest.mark.parametrize("sizes", [(1, 2), (1, 2, 4), (2, 3), (1, 1, 3, 4)])
def test_history_reaches_new_members_before_their_chunk(nodes, sizes):
    chunks = chunks_of([37, 22, 41, 30][: len(sizes)], [NAMES[:size] for size in sizes])
    asyncio.run(nodes.run("r", chunks, seed=5, pause_s=0.002))


def test_all_parts_of_tensor_parallel_pools_travel():
    nodes = Nodes(parts=2)
    asyncio.run(nodes.run("r", chunks_of([30, 50], [NAMES[:1], NAMES[:3]]), seed=1))
    nodes.check()
    nodes.close()


def test_fewer_tokens_than_members(nodes):
    chunks = chunks_of([1, 2, 5], [NAMES[:2], NAMES[:4], NAMES[:4]])
    asyncio.run(nodes.run("r", chunks, seed=3))


def test_the_checks_of_these_tests_see_a_wrong_byte(nodes):
    chunks = chunks_of([40, 30], [NAMES[:1], NAMES[:3]])
    jobs, roster = nodes.prepare("r", chunks, seed=1)
    nodes.all["a"].value = lambda seed, layer, positions: RingNode.value(
        nodes.all["a"], seed, layer, positions + (layer == 1)
    )
    for name, job in jobs.items():
        nodes.all[name].open(job, roster)

    async def members():
        await asyncio.gather(
            *(asyncio.to_thread(nodes.all[name].compute, job) for name, job in jobs.items())
        )
        for name, job in jobs.items():
            await job.link.close()
            nodes.all[name].check_share(job)
            nodes.all[name].release(job)

    asyncio.run(members())
    assert any("chunk 1 pass 0 layer 1 step 1" in wrong for wrong in jobs["b"].wrong)
    assert any("share, layer 1" in wrong for wrong in jobs["c"].wrong)


def test_groups_that_overlap_work_at_once(nodes):
    async def all_of_them():
        await asyncio.gather(
            nodes.run("r1", chunks_of([40, 50], [NAMES[:2], NAMES]), seed=1, pause_s=0.002),
            nodes.run("r2", chunks_of([30, 60], [("c",), ("c", "b", "d")]), seed=2, pause_s=0.002),
            nodes.run("r3", chunks_of([90], [("d", "a")]), seed=3, pause_s=0.001),
        )

    asyncio.run(all_of_them())


@pytest.mark.parametrize("seed", range(12))
def test_an_abort_at_any_point_ends_all_and_nothing_lands_late(nodes, seed):
    rng = random.Random(seed)
    size = rng.choice((2, 3, 4))
    chunks = chunks_of([41, 62, 37], [NAMES[:1], NAMES[:size], NAMES[: rng.randint(size, 4)]])
    jobs, roster = nodes.prepare("r", chunks, seed=seed)
    aborting = rng.choice(list(jobs))
    for node in nodes.all.values():
        node.transport.delay_s = 0.004

    async def member(name):
        node, job = nodes.all[name], jobs[name]
        await asyncio.sleep(rng.random() * 0.005)
        node.open(job, roster)
        done = await asyncio.to_thread(node.compute, job, random_pause(seed, 0.002))
        await job.link.close()
        node.release(job)
        return done

    async def abort():
        await asyncio.sleep(0.005 + rng.random() * 0.15)
        if (link := jobs[aborting].link) is not None:
            link.abort()

    async def all_of_them():
        async with asyncio.timeout(HANG_S):
            return await asyncio.gather(*(member(name) for name in jobs), abort())

    asyncio.run(all_of_them())
    time.sleep(0.02)  # all late writes would land
    nodes.check()
    assert not [wrong for job in jobs.values() for wrong in job.wrong]
    assert not jobs[aborting].aborted_by  # its owner knows


def test_a_member_that_ends_frees_the_others_after_a_grace(nodes, clock):
    chunks = chunks_of([60], [NAMES[:3]])
    jobs, roster = nodes.prepare("r", chunks, seed=1)
    for name, job in jobs.items():
        nodes.all[name].open(job, roster)

    heard = heard_by(nodes.all["b"])

    async def scenario():
        computes = [
            asyncio.create_task(asyncio.to_thread(nodes.all[name].compute, jobs[name]))
            for name in "ac"
        ]
        await eventually(lambda: "c" in heard)  # it has opened its buffers to b
        nodes.all["b"].transport.close()
        closes = []
        for name in "ac":
            jobs[name].link.abort()
            closes.append(asyncio.create_task(jobs[name].link.close()))
        assert not any(await asyncio.gather(*computes))
        await asyncio.sleep(0.05)
        assert not closes[1].done()  # b was before c in the ring: the grace
        clock.skip(LEASE_S + GRACE_S)
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*closes)

    asyncio.run(scenario())
    for name in "ac":
        nodes.all[name].release(jobs[name])
    jobs["b"].link.abort()
    asyncio.run(jobs["b"].link.close())
    nodes.all["b"].release(jobs["b"])


def test_a_silent_member_holds_the_pages_until_it_drains(nodes, clock):
    chunks = chunks_of([60], [NAMES[:2]])
    jobs, roster = nodes.prepare("r", chunks, seed=1)
    a, b = (nodes.all[name] for name in "ab")
    held = []
    b.transport.deliver = lambda *word: held.append(word)
    a.open(jobs["a"], roster)

    async def scenario():
        compute = asyncio.create_task(asyncio.to_thread(a.compute, jobs["a"]))
        await eventually(lambda: held)  # it has opened its buffers to the other member
        jobs["a"].link.abort()
        assert not await compute
        close = asyncio.create_task(jobs["a"].link.close())
        clock.skip(LEASE_S + 2 * GRACE_S)  # silence alone is not enough
        await asyncio.sleep(0.1)
        assert not close.done()
        del b.transport.deliver
        for word in held:
            b.transport.deliver(*word)
        async with asyncio.timeout(HANG_S):
            await close

    asyncio.run(scenario())
    a.release(jobs["a"])
    b.release(jobs["b"])
    with pytest.raises(TransferError, match="attempt 1 was opened before"):
        a.open(jobs["a"], roster)


def test_who_opens_a_group_that_was_given_up_learns_of_it_and_writes_nothing(nodes):
    chunks = chunks_of([60], [NAMES[:2]])
    jobs, roster = nodes.prepare("r", chunks, seed=1)
    nodes.all["a"].open(jobs["a"], roster)
    heard = heard_by(nodes.all["b"])

    async def scenario():
        compute = asyncio.create_task(asyncio.to_thread(nodes.all["a"].compute, jobs["a"]))
        await eventually(lambda: "a" in heard)  # its credit is at b
        jobs["a"].link.abort()
        assert not await compute
        async with asyncio.timeout(HANG_S):
            await jobs["a"].link.close()
        nodes.all["a"].release(jobs["a"])
        nodes.all["b"].open(jobs["b"], roster)
        assert jobs["b"].aborted_by == ["a gave up"]
        assert not await asyncio.to_thread(nodes.all["b"].compute, jobs["b"])
        assert not jobs["b"].link.bytes_sent
        async with asyncio.timeout(HANG_S):
            await jobs["b"].link.close()
        nodes.all["b"].release(jobs["b"])

    asyncio.run(scenario())


def test_a_word_that_makes_no_sense_ends_the_link(nodes):
    jobs, roster = nodes.prepare("r", chunks_of([60], [NAMES[:2]]), seed=1)
    a, b = (nodes.all[name] for name in "ab")
    a.open(jobs["a"], roster)
    word = RingMessage(kind=RingKind.BLOCK, request_id="r", attempt=1, chunk=4, number=3)
    b.transport.notify("a", word.encode()).result()
    assert not jobs["a"].link.history(0)
    (reason,) = jobs["a"].aborted_by
    assert reason.startswith("b: BLOCK 3 of chunk 4")
    asyncio.run(jobs["a"].link.close())
    for name, job in jobs.items():
        nodes.all[name].release(job)


def test_what_could_not_be_read_before_the_link_was_open_ends_the_group(nodes):
    """The credit of a comes to b garbled, and names no request: only a knows what it was about."""
    a, b = (nodes.all[name] for name in "ab")
    deliver = b.transport.deliver
    b.transport.deliver = lambda sender, payload: deliver(sender, payload[:1])
    jobs, roster = nodes.prepare("r", chunks_of([60], [NAMES[:2]]), seed=1)
    a.open(jobs["a"], roster)

    async def member(node):
        assert not await asyncio.to_thread(node.compute, jobs[node.name])
        async with asyncio.timeout(HANG_S):
            await jobs[node.name].link.close()
        node.release(jobs[node.name])

    async def scenario():
        ended = asyncio.create_task(member(a))
        await eventually(lambda: jobs["a"].aborted_by)
        b.transport.deliver = deliver
        b.open(jobs["b"], roster)
        await asyncio.gather(ended, member(b))

    asyncio.run(scenario())
    assert jobs["a"].aborted_by == ["b: what it got is not a notification of a ring"]
    assert jobs["b"].aborted_by == ["a gave up"]


def test_a_sender_asks_before_it_writes_when_its_right_has_run_out(nodes, clock):
    """A chunk after a pause of the group longer than the lease."""
    chunks = chunks_of([40, 40], [NAMES[:1], NAMES[:3]])
    jobs, roster = nodes.prepare("r", chunks, seed=1)
    stood_still = []

    def pause():
        if not stood_still:
            stood_still.append(True)
            clock.skip(2 * LEASE_S)

    async def member(name):
        node, job = nodes.all[name], jobs[name]
        node.open(job, roster)
        if name == "a":
            clock.skip(2 * LEASE_S)  # others' WANTs are old by now
        assert await asyncio.to_thread(node.compute, job, pause if name == "b" else lambda: None)
        await job.link.close()
        node.check_share(job)
        node.release(job)

    async def all_of_them():
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*(member(name) for name in jobs))

    asyncio.run(all_of_them())
    assert not [wrong for job in jobs.values() for wrong in job.wrong]


def test_members_whose_pages_differ_are_refused(nodes):
    chunks = chunks_of([40], [NAMES[:2]])
    jobs, roster = nodes.prepare("r", chunks, seed=1)
    odd = replace(roster["b"], layout=replace(roster["b"].layout, page_tokens=8))
    with pytest.raises(TransferError, match="page_tokens of b is 8, ours is 4"):
        nodes.all["a"].open(jobs["a"], {**roster, "b": odd})
    short = replace(roster["b"], pages=roster["b"].pages[:-1])
    nodes.all["a"].open(jobs["a"], {**roster, "b": short})
    with pytest.raises(TransferError, match=r"b has 4 pages of the request; its share .* needs 5"):
        nodes.all["a"].compute(jobs["a"])
    small = replace(roster["b"], buffer_pages=roster["b"].buffer_pages[:2])
    jobs["a"].link.abort()
    asyncio.run(jobs["a"].link.close())
    jobs["a"].attempt = 2
    nodes.all["a"].open(jobs["a"], {**roster, "b": small})
    with pytest.raises(TransferError, match="buffers at b hold 3 pages each; the largest"):
        nodes.all["a"].compute(jobs["a"])
    jobs["a"].link.abort()
    asyncio.run(jobs["a"].link.close())
    for name, job in jobs.items():
        nodes.all[name].release(job)
