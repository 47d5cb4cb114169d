"""Send and receive managers over NIXL and gRPC, both in this process: bytes, fences, accounting."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random

import pytest

from millrace.core.config import TransferConfig
from millrace.core.errors import ConfigError, IntegrityError, TransferError
from millrace.transfer.push.receive.staging import Staging
from millrace.transfer.transport.regions import Memory
from support.deadlines import HANG_S, eventually
from support.kv_nodes import (
    ReceiverNode,
    SenderNode,
    expected_kv,
    fill,
    first_tokens,
    layout,
    pages_of,
    read,
)

CONFIG = TransferConfig(lease_s=2.0, transfer_timeout_s=2.0, handshake_timeout_s=5.0)


@pytest.fixture
async def build():
    """Makes nodes; afterwards checks for leaks, and closes them."""
    nodes = []

    async def make(kind, made, config=CONFIG, **kwargs):
        node = kind(made, config, **kwargs)
        nodes.append(node)
        return await node.start() if isinstance(node, ReceiverNode) else node

    yield make
    for node in nodes:
        node.manager.check_integrity()
        await node.close()


def chunks_of(tokens: int, rng: random.Random) -> list[tuple[int, int]]:
    """Cuts a prompt at random tokens."""
    cuts = sorted({0, tokens, *(rng.randrange(tokens) for _ in range(rng.randrange(4)))})
    return [(a, b - a) for a, b in itertools.pairwise(cuts)]


async def transfer(sender, receiver, request_id, seed, tokens) -> None:
    """Runs one whole transfer; asserts the order of events and every byte."""
    sent, received = (pages_of(n.layout, tokens, seed) for n in (sender, receiver))
    kv = expected_kv(sender.layout, seed, tokens)
    fill(sender.pool, sender.layout, sent, kv)
    receiver.manager.admit(request_id, received, tokens)
    session = await sender.open(request_id, receiver.address, receiver.identity, sent, tokens)
    await sender.send(session, chunks_of(tokens, random.Random(seed)))
    assert await receiver.event() == ("first", request_id, "[11]")
    assert await receiver.event() == ("landed", request_id)
    heads = slice(receiver.layout.head_start, receiver.layout.head_end)
    got = read(receiver.pool, receiver.layout, received, tokens)
    assert (got == kv[:, :, heads]).all()
    sent_heads = receiver.layout.head_count
    assert session.timings.bytes == kv[:, :, :sent_heads].nbytes
    await receiver.manager.release(request_id)


@pytest.mark.parametrize("buffer_bytes", [0, 12_000, 1 << 20])
@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        (layout(), layout()),
        (layout(page_tokens=1, pages=256), layout(page_tokens=32)),
        (layout(page_tokens=5), layout(page_tokens=7, heads=(1, 2))),
        (layout(page_tokens=16), layout(page_tokens=3, pages=100, heads=(3, 1))),
    ],
)
async def test_exact_bytes(build, sender, receiver, buffer_bytes):
    config = TransferConfig(buffer_bytes=buffer_bytes, backends=2)
    to = await build(ReceiverNode, receiver, config)
    from_ = await build(SenderNode, sender, config)
    for seed, tokens in enumerate((203, 1, 97, 160)):
        await transfer(from_, to, f"request-{seed}", seed, tokens)


async def test_two_ranks_send_their_heads_to_one_receiver(build):
    to = await build(ReceiverNode, layout())
    ranks = [
        await build(SenderNode, layout(page_tokens=7, heads=heads), node_id=f"rank-{heads[0]}")
        for heads in ((0, 1), (1, 3))
    ]
    tokens, received = 150, pages_of(to.layout, 150, 1)
    kv = expected_kv(to.layout, 1, tokens)
    to.manager.admit("r", received, tokens)
    sessions = []
    for rank in ranks:
        sent = pages_of(rank.layout, tokens, 2)
        fill(rank.pool, rank.layout, sent, kv)
        sessions.append(await rank.open("r", to.address, to.identity, sent, tokens))
    for session in sessions:
        for layer in range(to.layout.num_layers):
            session.layer_ready(0, layer, 0, tokens)
    await sessions[0].finish(first_tokens(1))
    await to.event()
    assert await to.event() == ("landed", "r")
    assert (read(to.pool, to.layout, received, tokens) == kv).all()
    await to.manager.release("r")
    await sessions[1].abort("the other rank has finished it")


@pytest.mark.parametrize("backends", [2, 1])
async def test_fewer_backends_than_senders_serve_all_in_order(build, backends):
    config = TransferConfig(buffer_bytes=16_000, backends=backends)
    to = await build(ReceiverNode, layout(), config)
    senders = [await build(SenderNode, layout(), config, node_id=f"prefill-{n}") for n in range(4)]
    tokens, landed, sessions = 60, [], []
    for n, sender in enumerate(senders):
        pages = list(range(4 * n, 4 * n + 4))
        to.manager.admit(f"r{n}", pages, tokens)
        fill(sender.pool, sender.layout, pages, expected_kv(to.layout, n, tokens))
        sessions.append(await sender.open(f"r{n}", to.address, to.identity, pages, tokens))
        if n < backends:
            await eventually(lambda n=n: sessions[n].timings.granted_s)
        else:
            await asyncio.sleep(0.2)  # so that the order of first handshakes is known
    assert [bool(s.timings.granted_s) for s in sessions] == [n < backends for n in range(4)]
    await asyncio.gather(
        *(sender.send(s, [(0, tokens)]) for sender, s in zip(senders, sessions, strict=True))
    )
    while len(landed) < 4:
        kind, request, *_ = await to.event()
        if kind == "landed":
            landed.append(request)
            await to.manager.release(request)
    if backends == 1:
        assert landed == ["r0", "r1", "r2", "r3"]
    for n in range(4):
        got = read(to.pool, to.layout, list(range(4 * n, 4 * n + 4)), tokens)
        assert (got == expected_kv(to.layout, n, tokens)).all()


# -- refusals


async def refused(sender, receiver, *, identity=None, pattern: str) -> None:
    receiver.manager.admit("r", [0, 1, 2, 3], 50)
    session = await sender.open(
        "r", receiver.address, identity or receiver.identity, list(range(20)), 50
    )
    with pytest.raises(TransferError, match=pattern):
        await sender.send(session, [(0, 50)])
    await session.abort("refused")
    await receiver.manager.release("r")
    assert all(e[0] != "landed" for e in iter_events(receiver))


def iter_events(node):
    while not node.events.empty():
        yield node.events.get_nowait()


@pytest.mark.parametrize(
    ("changed", "pattern"),
    [
        ({"model_hash": "model-b"}, "model_hash differs.*'model-b'.*'model-a'"),
        ({"model_layers": 4}, "model_layers differs.*4.*3"),
        ({"head_dim": 16}, "head_dim differs.*16.*8"),
        ({"head_start": 2, "head_count": 2}, r"no common heads.*2\.\.3.*0\.\.1"),
    ],
)
async def test_another_model_or_layout_is_refused_with_both_named(build, changed, pattern):
    to = await build(ReceiverNode, layout(heads=(0, 2)))
    from_ = await build(SenderNode, dataclasses.replace(layout(heads=(0, 2)), **changed))
    await refused(from_, to, pattern=pattern)


async def test_a_stale_receiver_generation_is_refused(build):
    to = await build(ReceiverNode, layout(), generation=8)
    from_ = await build(SenderNode, layout())
    await refused(
        from_, to, identity=("decode-0", 7), pattern=r"generation 7.*decode-0 \(generation 8\)"
    )


async def test_an_earlier_life_of_a_sender_is_refused(build):
    to = await build(ReceiverNode, layout())
    late = await build(SenderNode, layout(), generation=5)
    young = await build(SenderNode, layout(), generation=6)
    await transfer(young, to, "first", 1, 40)
    await refused(late, to, pattern="stale sender.*generation 6")


async def test_a_request_nobody_admitted_is_refused(build):
    to = await build(ReceiverNode, layout())
    config = dataclasses.replace(CONFIG, handshake_timeout_s=2.0, transfer_timeout_s=2.0)
    from_ = await build(SenderNode, layout(), config)
    session = await from_.open("r", to.address, to.identity, [0], 5)
    with pytest.raises(TransferError, match="not admitted"):
        await from_.send(session, [(0, 5)])
    await session.abort("refused")


async def test_admission_may_come_after_the_handshake(build):
    to, from_ = await build(ReceiverNode, layout()), await build(SenderNode, layout())
    session = await from_.open("r", to.address, to.identity, [0], 5)
    sending = asyncio.create_task(from_.send(session, [(0, 5)]))
    await asyncio.sleep(0.1)
    to.manager.admit("r", [1], 5)
    await sending
    assert [(await to.event())[0] for _ in range(2)] == ["first", "landed"]
    await to.manager.release("r")


async def test_a_staging_buffer_too_small_for_a_token_is_refused(build):
    to = await build(ReceiverNode, layout(), TransferConfig(buffer_bytes=300))
    await refused(await build(SenderNode, layout()), to, pattern="buffer_bytes is 300")


async def test_an_address_where_nobody_serves(build):
    from_ = await build(SenderNode, layout())
    session = await from_.open("r", "127.0.0.1:1", ("decode-0", 1), [0], 5)
    with pytest.raises(TransferError, match=r"127\.0\.0\.1:1"):
        await from_.send(session, [(0, 5)])
    await session.abort("refused")


async def test_pages_that_cannot_hold_the_prompt(build):
    to, from_ = await build(ReceiverNode, layout()), await build(SenderNode, layout())
    with pytest.raises(TransferError, match="can't hold"):
        to.manager.admit("r", [0], 17)
    with pytest.raises(TransferError, match="outside the pool"):
        await from_.open("r", to.address, to.identity, [64], 5)
    to.manager.admit("r", [0], 5)
    with pytest.raises(TransferError, match="admitted already"):
        to.manager.admit("r", [1], 5)
    await to.manager.release("r")


async def test_device_memory_needs_buffer_free_mode(build):
    to = await build(ReceiverNode, layout())
    on_device = Memory(to.pool.data_ptr(), 64, device=0)
    with pytest.raises(ConfigError, match="buffer_bytes"):
        Staging(to.transport, on_device, layout(), count=1, buffer_bytes=10)


# -- accounting


async def started(sender, receiver, tokens=50):
    receiver.manager.admit("r", [0, 1, 2, 3], tokens)
    return await sender.open("r", receiver.address, receiver.identity, [0, 1, 2, 3], tokens)


async def failed_with(receiver, pattern):
    while (event := await receiver.event())[0] == "first":
        pass
    assert event[0] == "failed"
    assert pattern in event[2], event


async def test_a_gap_never_decodes(build):
    to, from_ = await build(ReceiverNode, layout()), await build(SenderNode, layout())
    session = await started(from_, to)
    for layer in (0, 2):
        session.layer_ready(0, layer, 0, 50)
    session.layer_ready(0, 1, 0, 49)
    await session.finish(first_tokens(1))
    await failed_with(to, "0.7 % of its KV is missing, first in layer 1")
    await to.manager.release("r")


async def test_a_missing_chunk_never_decodes(build):
    to, from_ = await build(ReceiverNode, layout()), await build(SenderNode, layout())
    session = await started(from_, to)
    for layer in range(3):
        session.layer_ready(0, layer, 0, 50)
    await session.finish(first_tokens(2))
    await failed_with(to, "chunks [0] arrived, 2 were announced")
    await to.manager.release("r")


async def test_a_part_that_comes_twice_fails_the_request(build):
    to, from_ = await build(ReceiverNode, layout()), await build(SenderNode, layout())
    session = await started(from_, to)
    session.layer_ready(0, 0, 0, 30)
    session.layer_ready(1, 0, 29, 21)
    await failed_with(to, "layer 0, heads 0..3, tokens 29..49 arrived twice")
    await session.abort("failed")
    await to.manager.release("r")


async def test_finishing_twice_is_refused(build):
    to, from_ = await build(ReceiverNode, layout()), await build(SenderNode, layout())
    session = await started(from_, to)
    for layer in range(3):
        session.layer_ready(0, layer, 0, 50)
    ticket = session.ticket
    await session.finish(first_tokens(1))
    peer = from_.peers.to(to.address)
    with pytest.raises(TransferError, match="finished already"):
        await peer.finish(ticket, first_tokens(1), timeout_s=HANG_S)
    stranger = dataclasses.replace(ticket, sender=type(ticket.sender)("prefill-9", 1))
    with pytest.raises(TransferError, match="not done the handshake"):
        await peer.finish(stranger, first_tokens(1), timeout_s=HANG_S)
    await peer.abort(stranger, reason="mischief", drained=True, timeout_s=HANG_S)
    for expected in ("first", "landed"):
        assert (await to.event())[0] == expected
    assert not list(iter_events(to))
    await to.manager.release("r")


async def test_first_tokens_come_before_the_kv(build):
    to, from_ = await build(ReceiverNode, layout()), await build(SenderNode, layout())
    session = await started(from_, to)
    finishing = asyncio.create_task(session.finish(first_tokens(1)))
    session.layer_ready(0, 0, 0, 50)
    assert (await to.event())[0] == "first"
    for layer in (1, 2):
        session.layer_ready(0, layer, 0, 50)
    assert await to.event() == ("landed", "r")
    await finishing
    await to.manager.release("r")


# -- ends


async def test_release_before_anything_came_is_immediate(build):
    to = await build(ReceiverNode, layout())
    to.manager.admit("r", [0], 5)
    async with asyncio.timeout(HANG_S):
        await to.manager.release("r")
        await to.manager.release("unknown")


async def test_the_id_can_be_admitted_again_while_the_old_pages_drain(build):
    to, from_ = await build(ReceiverNode, layout()), await build(SenderNode, layout())
    session = await started(from_, to)
    session.layer_ready(0, 0, 0, 50)
    releasing = asyncio.create_task(to.manager.release("r"))
    await asyncio.sleep(0)
    to.manager.admit("r", [8, 9, 10, 11], 50)
    await session.abort("cancelled")
    await releasing
    assert not list(iter_events(to))
    again = await from_.open("r", to.address, to.identity, [0, 1, 2, 3], 50)
    await from_.send(again, [(0, 50)])
    assert [(await to.event())[0] for _ in range(2)] == ["first", "landed"]
    await to.manager.release("r")


async def test_a_sender_that_was_replaced_is_fenced(build):
    to, from_ = await build(ReceiverNode, layout()), await build(SenderNode, layout())
    session = await started(from_, to)
    session.layer_ready(0, 0, 0, 50)
    await eventually(lambda: session.timings.granted_s)
    later = await build(SenderNode, layout(), generation=6)
    other = await later.open("s", to.address, to.identity, [0, 1, 2, 3], 50)
    await failed_with(to, "prefill-0 is gone")
    releasing = asyncio.create_task(to.manager.release("r"))
    await session.abort("lost")
    await releasing
    await other.abort("unneeded")


async def test_an_open_session_is_found(build):
    to, from_ = await build(ReceiverNode, layout()), await build(SenderNode, layout())
    session = await started(from_, to)
    with pytest.raises(IntegrityError, match="'r'"):
        from_.manager.check_integrity()
    with pytest.raises(TransferError, match="sent already"):
        await from_.open("r", to.address, to.identity, [0, 1, 2, 3], 50)
    await session.abort("cancelled")
    await to.manager.release("r")


async def test_many_requests_at_once(build):
    to = await build(ReceiverNode, layout(pages=256))
    from_ = await build(SenderNode, layout(pages=512, page_tokens=8))
    rng = random.Random(3)
    at_to = at_from = 0
    requests = []
    for n in range(24):
        tokens = rng.randrange(1, 150)
        need = to.layout.pages_for(tokens), from_.layout.pages_for(tokens)
        pages = list(range(at_to, at_to + need[0])), list(range(at_from, at_from + need[1]))
        at_to, at_from = at_to + need[0], at_from + need[1]
        requests.append((f"r{n}", tokens, *pages))
        fill(from_.pool, from_.layout, pages[1], expected_kv(to.layout, n, tokens))
        to.manager.admit(f"r{n}", pages[0], tokens)

    async def one(n, request_id, tokens, sent):
        session = await from_.open(request_id, to.address, to.identity, sent, tokens)
        if n % 5 == 4:
            session.layer_ready(0, 0, 0, tokens)
            await session.abort("cancelled")
        else:
            await from_.send(session, chunks_of(tokens, random.Random(n)))

    await asyncio.gather(*(one(n, r, t, sent) for n, (r, t, _, sent) in enumerate(requests)))
    landed = set()
    while len(landed) < 20:
        kind, request_id, *_ = await to.event()
        if kind == "landed":
            landed.add(request_id)
    assert landed == {f"r{n}" for n in range(24) if n % 5 != 4}
    for n, (request_id, tokens, received, _) in enumerate(requests):
        if n % 5 != 4:
            got = read(to.pool, to.layout, received, tokens)
            assert (got == expected_kv(to.layout, n, tokens)).all()
        await to.manager.release(request_id)
