"""A prompt's KV in shards of tokens, layers and heads: any into any, and failures."""

from __future__ import annotations

import asyncio
import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import Run, zigzag
from millrace.core.kv.transfer import HandshakeRefused, HistoryAsk, Ticket
from millrace.transfer.push.control import Target
from millrace.transfer.ring.messages import RING_CHANNEL, RingMessage
from support.deadlines import HANG_S, eventually
from support.kv_nodes import expected_kv, layout
from transfer.ring.kv_spread import CONFIG, End, meets, spread, without_token

LAYERS, HEADS = 4, 4
BUFFERED = dataclasses.replace(CONFIG, buffer_bytes=24_000, backends=1)


def pool(layers=(0, LAYERS), heads=(0, HEADS), page_tokens=16, pages=64, parts=1) -> KvLayout:
    made = layout(
        layers=layers[1] - layers[0],
        layer_start=layers[0],
        model_layers=LAYERS,
        heads=(heads[0], heads[1] - heads[0]),
        page_tokens=page_tokens,
        pages=pages,
    )
    return dataclasses.replace(made, parts=parts)


def cut(draw, end: int, most: int) -> list[tuple[int, int]]:
    """Splits [0, end) into at most `most` neighbouring pieces."""
    cuts = draw(st.sets(st.integers(1, end - 1), max_size=most - 1)) if end > 1 else set()
    return list(pairwise(sorted({0, end, *cuts})))


@dataclasses.dataclass
class Split:
    """Draws, for a prompt of `tokens`: passes, the group's size, and each pool's part on a side."""

    tokens: int
    passes: list[tuple[int, int]]
    members: int
    senders: list[KvLayout]
    receivers: list[tuple[KvLayout, tuple[int, int]]]
    buffered: bool


@st.composite
def splits(draw) -> Split:
    tokens = draw(st.integers(1, 90))
    page_tokens = st.sampled_from([1, 4, 5, 16])

    def stages(most: int) -> list[KvLayout]:
        return [
            pool(layers, heads, draw(page_tokens), pages=128)
            for layers in cut(draw, LAYERS, most)
            for heads in cut(draw, HEADS, 2)
        ]

    return Split(
        tokens=tokens,
        passes=cut(draw, tokens, 3),
        members=draw(st.integers(1, 3)),
        senders=stages(3),
        receivers=[(made, shard) for shard in cut(draw, tokens, 3) for made in stages(2)],
        buffered=draw(st.booleans()),
    )


def shares(split: Split) -> list[list[tuple[int, list[Run]]]]:
    """Returns for each member its pass and its runs, slot after slot."""
    slots = [0] * split.members
    found: list[list[tuple[int, list[Run]]]] = [[] for _ in slots]
    for number, (start, end) in enumerate(split.passes):
        for member, pieces in enumerate(zigzag(end - start, split.members)):
            runs = []
            for first, count in pieces:
                if count:
                    runs.append(Run(start + first, count, slots[member]))
                    slots[member] += count
            found[member].append((number, runs))
    return found


async def land(split: Split) -> None:
    """Every stage of the sending instance is a group of its own."""
    kv = expected_kv(pool(), split.tokens, split.tokens)
    work = shares(split)
    made = [one for one in split.senders for _ in range(split.members)]
    config = BUFFERED if split.buffered else CONFIG
    async with spread(made, [one for one, _ in split.receivers], config) as (senders, receivers):
        for receiver, (_, shard) in zip(receivers, split.receivers, strict=True):
            receiver.admit(split.tokens, shard)
        told: set[int] = set()
        jobs = []
        for number, sender in enumerate(senders):
            member = number % split.members
            targets = []
            for i, receiver in enumerate(receivers):
                if not meets(sender, receiver):
                    continue
                final_message = None
                if member == 0 and i not in told:  # the first stage's leader does the handshake
                    told.add(i)
                    final_message = without_token if i else lambda end: end
                targets.append(receiver.target(final_message=final_message, is_owner=not i))
            runs = [run for _, part in work[member] for run in part]
            session = await sender.open(targets, kv, runs)
            for index, part in work[member]:
                for run in part:
                    for layer in sender.layout.layers:
                        session.layer_ready(index, layer, run.start_token, run.num_tokens)
            jobs.append(session.finish(End(len(split.passes), 11)))
        await asyncio.gather(*jobs)
        for i, receiver in enumerate(receivers):
            heard = [await receiver.event(), await receiver.event()]
            assert sorted(heard) == [("finished", None if i else 11), ("landed",)]
            assert receiver.has(kv)
            assert receiver.events.empty()


@settings(max_examples=40)
@given(splits())
def test_any_split_lands_in_any_other_once_and_right(split: Split) -> None:
    asyncio.run(land(split))


# -- one spread prompt, of 50 tokens

TOKENS, SHARDS = 50, ((0, 16), (16, 35), (35, 50))


async def opened(sender, receivers, kv, **options):
    """Admits all shards, and opens the session to them."""
    for receiver, shard in zip(receivers, SHARDS, strict=True):
        receiver.admit(TOKENS, shard)
    return await sender.open(told(receivers), kv, **options)


def told(receivers) -> list[Target]:
    """The first receiver is the KV owner."""
    first, *others = receivers
    owner = first.target(final_message=lambda end: end, is_owner=True)
    return [owner, *(receiver.target(final_message=without_token) for receiver in others)]


def ready(session, first=0, end=2) -> None:
    """Passes of 30 and of 20 tokens: the first and the last shard know one of them each."""
    for number, (start, count) in [(0, (0, 30)), (1, (30, 20))][first:end]:
        for layer in range(LAYERS):
            session.layer_ready(number, layer, start, count)


@pytest.mark.parametrize("config", [CONFIG, BUFFERED], ids=["buffer-free", "buffered"])
async def test_passes_that_miss_a_shard_do_not_arrive_there(config) -> None:
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool(parts=2)], [pool()] * 3, config) as ((sender,), receivers):
        session = await opened(sender, receivers, kv)
        assert session.receiver_ids == ("holder-0", "holder-1", "holder-2")
        ready(session)
        await session.finish(End(2, 11))
        for receiver in receivers:
            assert (await receiver.outcome()) == ("landed",) and receiver.has(kv)
        timings = session.timings
        assert timings.bytes == kv.nbytes
        assert timings.opened_s <= timings.granted_s
        assert 0 < timings.first_write_s <= timings.last_write_s


async def test_nothing_is_told_of_prefixes_of_a_shard_and_nothing_is_kept() -> None:
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool()], [pool()] * 3) as ((sender,), receivers):
        session = await opened(sender, receivers, kv)
        ready(session, end=1)
        await eventually(lambda: receivers[0].has(kv))
        await session.abort("the test wants it")
        assert [(await r.event())[0] for r in receivers] == ["failed"] * 3
        assert all(r.events.empty() for r in receivers)
        with pytest.raises(TransferError, match="3 tokens can't be kept: 0 have landed"):
            receivers[0].manager.rewind("r", 2, 3)


@pytest.mark.parametrize(("missing", "lands"), [((0, 0, 16), "1 2"), ((1, 35, 15), "0 1")])
async def test_a_shard_that_lacks_something_never_lands(missing, lands) -> None:
    config = dataclasses.replace(CONFIG, transfer_timeout_s=0.6)
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool()], [pool()] * 3, config) as ((sender,), receivers):
        session = await opened(sender, receivers, kv)
        for number, start, count in ((0, 0, 16), (0, 16, 14), (1, 30, 5), (1, 35, 15)):
            for layer in range(LAYERS):
                if layer != 2 or (number, start, count) != missing:
                    session.layer_ready(number, layer, start, count)
        await session.finish(End(2, 11))
        for i, receiver in enumerate(receivers):
            outcome = await receiver.outcome()
            assert outcome[0] == ("landed" if str(i) in lands else "failed")
            if outcome[0] == "failed":
                assert "first in layer 2" in outcome[1]


@pytest.mark.parametrize(
    ("numbers", "total"),
    [((0, 1), 3), ((1, 2), 3), ((0, 2), 3), ((0, 1), 1)],
    ids=["last missing", "first missing", "gap", "more than announced"],
)
async def test_the_passes_of_a_shard_must_be_those_that_were_announced(numbers, total) -> None:
    config = dataclasses.replace(CONFIG, transfer_timeout_s=0.6)
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool()], [pool()], config) as ((sender,), (receiver,)):
        receiver.admit(TOKENS, (0, TOKENS))
        session = await sender.open([receiver.target(final_message=lambda end: end)], kv)
        for number, (start, count) in zip(numbers, ((0, 30), (30, 20)), strict=True):
            for layer in range(LAYERS):
                session.layer_ready(number, layer, start, count)
        await session.finish(End(total, 11))
        outcome = await receiver.outcome()
        assert outcome[0] == "failed" and f"{total} were announced" in outcome[1]


@pytest.mark.parametrize("shard", [(0, 15), (1, 16), (0, TOKENS)])
async def test_a_sender_that_means_other_tokens_is_refused_with_both_named(shard) -> None:
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool()], [pool()]) as ((sender,), (receiver,)):
        receiver.admit(TOKENS, (0, 16))
        target = receiver.target(
            start_token=shard[0], end_token=shard[1], final_message=without_token
        )
        session = await sender.open([target], kv)
        ready(session)
        expected = rf"means {shard[0]}\.\.{shard[1] - 1}, the receiver expects 0\.\.15 of 50"
        with pytest.raises(HandshakeRefused, match=expected):
            await session.finish(End(2, 11))
        await session.abort("refused")


async def test_what_one_holder_refuses_fails_the_whole() -> None:
    kv = expected_kv(pool(), 1, TOKENS)
    other = dataclasses.replace(pool(), model_hash="model-b")
    async with spread([pool()], [pool(), other, pool()]) as ((sender,), receivers):
        session = await opened(sender, receivers, kv)
        ready(session, end=1)
        await eventually(lambda: session.failure is not None)
        assert "model_hash differs" in str(session.failure)
        with pytest.raises(TransferError, match="model_hash differs"):
            await session.finish(End(2, 11))
        await session.abort("refused")
        for holder in (receivers[0], receivers[2]):
            kind, why, *rest = await holder.event()
            assert (kind, rest) == ("failed", [1, 0])  # and no first token
            assert why.startswith("prefill-0 gave the transfer up")  # the reason may come later


async def test_a_holder_that_dies_fails_the_whole_and_frees_the_others() -> None:
    config = dataclasses.replace(CONFIG, transfer_timeout_s=0.6, lease_s=2.0)
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool()], [pool()] * 3, config) as ((sender,), receivers):
        session = await opened(sender, receivers, kv)
        await session.opened()
        receivers[1].transport.close()
        receivers[1].peer.alive = False
        ready(session)
        with pytest.raises(TransferError):
            await session.finish(End(2, 11))
        async with asyncio.timeout(HANG_S):
            await session.abort("a holder is gone")
        for receiver in receivers:
            await receiver.release()


async def test_a_holder_that_has_no_use_for_it_holds_nobody_up() -> None:
    """It freed its shard: the others' owners hear of it from it, not from here."""
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool()], [pool()] * 3) as ((sender,), receivers):
        session = await opened(sender, receivers, kv)
        await session.opened()
        releasing = asyncio.create_task(receivers[1].release())
        await asyncio.sleep(0.05)
        ready(session)
        await session.finish(End(2, 11))
        await releasing
        for receiver in (receivers[0], receivers[2]):
            assert (await receiver.outcome()) == ("landed",) and receiver.has(kv)


async def test_a_holder_without_a_backend_lets_the_others_go_on() -> None:
    """The current request is another one; when that is over the shard lands. The others' reports of
    free slots, which they repeat many times, arrive during it.
    """
    kv = expected_kv(pool(), 1, TOKENS)
    config = dataclasses.replace(BUFFERED, buffer_bytes=4096)
    async with spread([pool(pages=128)], [pool()] * 3, config) as ((sender,), receivers):
        busy = receivers[1]
        blocking = busy.take(1)
        busy.manager.admit("other", blocking, 5)
        other = await sender.manager.open(
            "other", peer=busy.peer, receiver=busy.identity, prompt_tokens=5, pages=[0]
        )
        await other.opened()
        session = await opened(sender, receivers, kv)
        ready(session)
        finishing = asyncio.create_task(session.finish(End(2, 11)))
        await eventually(lambda: receivers[0].has(kv) and receivers[2].has(kv))
        assert not session.timings.granted_s and not finishing.done()
        await other.abort("the test wants it")
        await finishing
        for receiver in (receivers[0], receivers[2]):
            assert (await receiver.outcome()) == ("landed",)
        while (event := await busy.event())[0] != "landed":
            assert event[0] in ("failed", "finished")  # of the other request, and of this one
        assert busy.has(kv)
        await busy.manager.release("other")


async def test_prompts_that_wait_for_each_others_buffers_both_land() -> None:
    """Each has its KV owner's one buffer, and wants the buffer of the other's KV owner."""
    config = dataclasses.replace(BUFFERED, handshake_timeout_s=1.5)
    names = ("r", "s")
    async with spread([pool(), pool()], [pool(), pool()], config) as (senders, receivers):
        sessions = []
        for name, sender, homes in zip(names, senders, (receivers, receivers[::-1]), strict=True):
            homes[0].shard, homes[1].shard = SHARDS[0], (16, TOKENS)
            homes[0].manager.admit(name, homes[0].take(1), TOKENS, shard=homes[0].shard)
            sessions.append(
                await sender.manager.open_spread(
                    name, told(homes), prompt_tokens=TOKENS, pages=[0, 1, 2, 3]
                )
            )
            await eventually(lambda homes=homes: homes[0].manager.num_leases)
        for name, other in zip(names, receivers[::-1], strict=True):
            other.manager.admit(name, other.take(3), TOKENS, shard=(16, TOKENS))
        for session in sessions:
            ready(session)
        await asyncio.gather(*(session.finish(End(2, 11)) for session in sessions))
        for receiver in receivers:
            heard = [await receiver.event() for _ in range(4)]
            assert heard.count(("landed",)) == 2 and ("finished", 11) in heard
            for name in names:
                await receiver.manager.release(name)


async def test_an_attempt_that_is_over_is_fenced_off_at_every_shard() -> None:
    kv, stale = (expected_kv(pool(), seed, TOKENS) for seed in (1, 2))
    async with spread([pool(), pool()], [pool()] * 3) as ((late, sender), receivers):
        before = await opened(late, receivers, stale)
        await before.opened()
        late.transport.gate.clear()
        ready(before)
        await eventually(lambda: len(late.transport.peers) == 3)
        for receiver in receivers:
            receiver.manager.rewind("r", 2, 0)
        late.transport.gate.set()  # its writes land, and are not counted
        await eventually(lambda: not late.transport.in_flight)
        session = await sender.open(told(receivers), kv, attempt=2)
        ready(session)
        await session.finish(End(2, 12))
        for receiver in receivers:
            assert (await receiver.outcome()) == ("landed",) and receiver.has(kv)
        with pytest.raises(TransferError, match="stopped the transfer"):
            await before.finish(End(2, 11))
        await before.abort("over")


async def test_a_leader_without_a_token_of_a_shard_tells_its_holder_of_the_end() -> None:
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool(), pool()], [pool()] * 3) as ((leader, other), receivers):
        runs = [[Run(0, 16, 0), Run(35, 15, 16)], [Run(16, 19, 0)]]
        leading = await opened(leader, receivers, kv, runs=runs[0])
        other_targets = [receiver.target() for receiver in receivers]
        following = await other.open(other_targets, kv, runs[1])
        assert following.receiver_ids == ("holder-1",)
        for session, part in ((leading, runs[0]), (following, runs[1])):
            for run in part:
                for layer in range(LAYERS):
                    session.layer_ready(0, layer, run.start_token, run.num_tokens)
        await asyncio.gather(leading.finish(End(1, 11)), following.finish(None))
        for receiver in receivers:
            assert (await receiver.outcome()) == ("landed",) and receiver.has(kv)


async def test_a_stage_that_shares_no_layer_with_a_receiver_opens_no_session() -> None:
    kv = expected_kv(pool(), 1, TOKENS)
    stages = [pool((0, 2)), pool((2, 4))]
    async with spread(stages, [pool((0, 1)), pool((1, 4))]) as (senders, receivers):
        for receiver in receivers:
            receiver.admit(TOKENS, (0, TOKENS))
        told = [receivers[0].target(final_message=without_token), receivers[1].target()]
        last = [receivers[0].target(), receivers[1].target(final_message=lambda end: end)]
        sessions = [
            await sender.open(targets, kv)
            for sender, targets in zip(senders, (told, last), strict=True)
        ]
        assert [s.receiver_ids for s in sessions] == [("holder-0", "holder-1"), ("holder-1",)]
        for sender, session in zip(senders, sessions, strict=True):
            for layer in sender.layout.layers:
                session.layer_ready(0, layer, 0, TOKENS)
        await asyncio.gather(*(session.finish(End(1, 11)) for session in sessions))
        for receiver in receivers:
            assert (await receiver.outcome()) == ("landed",) and receiver.has(kv)


async def test_a_layer_that_is_not_the_senders_fails_the_transfer() -> None:
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool((0, 2))], [pool()]) as ((sender,), (receiver,)):
        receiver.admit(TOKENS, (0, TOKENS))
        session = await sender.open([receiver.target()], kv)
        session.layer_ready(0, 2, 0, TOKENS)
        with pytest.raises(TransferError, match="layer 2 does not lie in this pool"):
            await session.finish(None)
        await session.abort("failed")


async def test_a_receiver_whose_layers_nobody_knew_refuses_one_that_has_none_of_them() -> None:
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool((0, 2))], [pool((2, 4))]) as ((sender,), (receiver,)):
        receiver.admit(TOKENS, (0, TOKENS))
        session = await sender.open([receiver.target(layers=None)], kv)
        with pytest.raises(HandshakeRefused, match=r"no common layers: the sender has 0\.\.1, "):
            await session.finish(None)
        await session.abort("refused")


async def test_targets_that_cannot_be() -> None:
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool()], [pool()]) as ((sender,), (receiver,)):
        receiver.admit(TOKENS, (0, TOKENS))
        one = receiver.target()
        for targets, pattern in (
            ([one, one], "two of its shards are at one receiver"),
            ([dataclasses.replace(one, end_token=51)], r"tokens 0\.\.50 for holder-0 are not in"),
            (
                [dataclasses.replace(one, start_token=50)],
                r"tokens 50\.\.49 for holder-0 are not in",
            ),
        ):
            with pytest.raises(TransferError, match=pattern):
                await sender.open(targets, kv)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"shard": (10, 10)}, r"tokens 10\.\.9 are not in a prompt of 50"),
        ({"shard": (40, 51)}, r"tokens 40\.\.50 are not in a prompt of 50"),
        ({"shard": (0, 40)}, "2 pages of 16 tokens can't hold 40 tokens"),
        (
            {"shard": (0, 20), "kept_tokens": 3},
            "kept_tokens is 3; it must be below 50, and 0 for a shard",
        ),
        ({"kept_tokens": 50}, "kept_tokens is 50; it must be below 50"),
    ],
)
async def test_shards_that_cannot_be(options, pattern) -> None:
    async with spread([], [pool()]) as (_, (receiver,)):
        with pytest.raises(TransferError, match=pattern):
            receiver.manager.admit("r", [0, 1], 50, **options)


async def test_what_is_kept_from_the_beginning_need_not_come() -> None:
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool()], [pool()]) as ((sender,), (receiver,)):
        receiver.admit(TOKENS, None, kept_tokens=16)
        receiver.fill(receiver.pages, [Run(0, 16, 0)], kv)
        session = await sender.open(
            [receiver.target(final_message=lambda end: end)], kv, [Run(16, 34, 0)]
        )
        for number, (start, count) in enumerate(((16, 14), (30, 20))):
            for layer in range(LAYERS):
                session.layer_ready(number, layer, start, count)
        await session.finish(End(2, 11))
        assert (await receiver.outcome()) == ("landed",) and receiver.has(kv)


@pytest.mark.parametrize("theirs", [(0, 4), (1, 4), (1, 3)])
async def test_a_stage_gets_the_history_of_its_own_layers(theirs) -> None:
    kv = expected_kv(pool(), 1, TOKENS)
    stages = [pool(), pool((1, 3), page_tokens=4)]
    async with spread(stages, [pool(theirs)]) as ((sender, asker), (receiver,)):
        ask, arrived = await asked_for(sender, asker, receiver, kv)
        await receiver.peer.send_history(ask, timeout_s=1)
        await eventually(lambda: len(arrived) == 2)
        assert arrived == [1, 2]
        assert asker.holds(ask.pages, ask.runs, kv)


async def test_history_of_layers_that_are_elsewhere_is_refused_with_both_named() -> None:
    kv = expected_kv(pool(), 1, TOKENS)
    async with spread([pool(), pool((1, 3))], [pool((2, 4))]) as ((sender, asker), (receiver,)):
        ask, _ = await asked_for(sender, asker, receiver, kv)
        with pytest.raises(HandshakeRefused, match=r"asks for layers 1\.\.2, 2\.\.3 lie here"):
            await receiver.peer.send_history(ask, timeout_s=1)


async def asked_for(sender, asker, receiver, kv) -> tuple[HistoryAsk, list[int]]:
    """Returns the request of a second attempt's member, after a first attempt of 30 tokens, and a
    list that gets the layers of its notifications.
    """
    receiver.admit(TOKENS, None)
    session = await sender.open([receiver.target()], kv)
    for layer in receiver.layout.layers:
        session.layer_ready(0, layer, 0, 30)
    assert await receiver.event() == ("prefix", 30)
    await session.abort("the test wants it")
    assert (await receiver.event())[0] == "failed"
    receiver.manager.rewind("r", 2, 30)
    arrived: list[int] = []
    asker.transport.subscribe(
        RING_CHANNEL, lambda _, payload: arrived.append(RingMessage.decode(payload).number)
    )
    ask = HistoryAsk(
        ticket=Ticket(
            request_id="r",
            sender=Incarnation("prefill-1", 5),
            receiver=Incarnation(*receiver.identity),
            attempt=2,
        ),
        layout=asker.layout,
        pages=asker.take(asker.layout.pages_for(20)),
        runs=[Run(7, 20, 0)],
        agent_metadata=asker.transport.metadata(),
    )
    return ask, arrived
