"""Peers that send anything at all: calls and notifications. The receiver refuses, and goes on."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.core.config import TransferConfig
from millrace.transfer.push.messages import Kind, Message, WrittenRange
from millrace.wire.pb import common_pb2, transfer_pb2, transfer_pb2_grpc
from support.deadlines import HANG_S
from support.kv_nodes import ReceiverNode, SenderNode, expected_kv, fill, layout, read

PAGES, TOKENS = [0, 1, 2, 3], 50
small = st.integers(0, 3)
u32 = st.one_of(small, st.integers(0, 2**32 - 1))
u64 = st.one_of(small, st.sampled_from([5, 7]), st.integers(0, 2**64 - 1))
names = st.one_of(
    st.sampled_from(["r", "prefill-0", "decode-0", "model-a", ""]), st.text(max_size=6)
)

incarnations = st.builds(common_pb2.Incarnation, id=names, generation=u64)
tickets = st.builds(
    transfer_pb2.Ticket,
    request_id=names,
    sender=incarnations,
    receiver=st.one_of(incarnations, st.just(common_pb2.Incarnation(id="decode-0", generation=7))),
    attempt=u32,
)
layouts = st.builds(
    transfer_pb2.KvLayout,
    model_hash=names,
    dtype=small,
    num_layers=u32,
    num_kv_heads=u32,
    head_dim=u32,
    page_tokens=u32,
    head_start=u32,
    head_count=u32,
    num_pages=u32,
    parts=u32,
    layer_start=u32,
    model_layers=u32,
    copies=u32,
    stages=u32,
)
calls = st.one_of(
    st.tuples(
        st.just("Handshake"),
        st.builds(
            transfer_pb2.HandshakeRequest,
            ticket=tickets,
            layout=layouts,
            start_token=u32,
            num_tokens=u32,
            agent_metadata=st.binary(max_size=40),
        ),
    ),
    st.tuples(
        st.just("FinishPrefill"),
        st.builds(
            transfer_pb2.FinishPrefillRequest,
            ticket=tickets,
            finished=st.builds(transfer_pb2.FinishedPrefill, total_chunks=u32),
        ),
    ),
    st.tuples(
        st.just("AbortTransfer"),
        st.builds(
            transfer_pb2.AbortTransferRequest,
            ticket=tickets,
            reason=names,
            drained=st.booleans(),
        ),
    ),
    st.tuples(
        st.just("SendHistory"),
        st.builds(
            transfer_pb2.SendHistoryRequest,
            ticket=tickets,
            layout=layouts,
            pages=st.lists(u32, max_size=4),
            agent_metadata=st.binary(max_size=40),
            region=u32,
        ),
    ),
)
messages = st.builds(
    Message,
    kind=st.sampled_from([kind for kind in Kind if kind <= Kind.DRAINED]),
    request_id=names,
    lease=small,
    generation=st.sampled_from([7, 6]),
    slot=u32,
    parts=st.lists(
        st.builds(
            WrittenRange,
            chunk=u32,
            layer=st.integers(0, 5),
            start_token=u32,
            num_tokens=u32,
            nbytes=u64,
            checksum=u32,
        ),
        max_size=3,
    ).map(tuple),
)
notifications = st.one_of(
    st.binary(max_size=60).map(lambda tail: b"\x01" + tail),
    messages.map(Message.encode),
)


async def check(node: ReceiverNode, sender: SenderNode) -> None:
    """Asserts that a request lands as ever, and that nothing of what came before is left."""
    request = "after all"
    while not node.events.empty():
        node.events.get_nowait()
    node.manager.admit(request, PAGES, TOKENS)
    kv = expected_kv(node.layout, 2, TOKENS)
    fill(sender.pool, sender.layout, PAGES, kv)
    session = await sender.open(request, node.address, node.identity, PAGES, TOKENS)
    await sender.send(session, [(0, TOKENS)])
    assert [(await node.event())[0] for _ in range(2)] == ["first", "landed"]
    assert (read(node.pool, node.layout, PAGES, TOKENS) == kv).all()
    await node.manager.release(request)
    node.manager.check_integrity()


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(st.lists(calls, min_size=10, max_size=40))
def test_any_calls_are_answered(asked) -> None:
    config = TransferConfig(lease_s=2.0, transfer_timeout_s=2.0, handshake_timeout_s=HANG_S)

    async def run() -> None:
        node = await ReceiverNode(layout(), config).start()
        sender = SenderNode(layout(), config)
        async with grpc.aio.insecure_channel(node.address) as channel:
            stub = transfer_pb2_grpc.KvReceiverStub(channel)
            answers = [getattr(stub, name)(message, timeout=0.2) for name, message in asked]
            async with asyncio.timeout(HANG_S):
                await asyncio.gather(*answers, return_exceptions=True)
        await check(node, sender)
        await sender.close()
        await node.close()

    asyncio.run(run())


@pytest.mark.parametrize("buffer_bytes", [0, 24_000], ids=["buffer-free", "buffered"])
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(sent=st.lists(notifications, min_size=5, max_size=40))
def test_any_notifications_of_a_peer_with_a_lease_are_survived(buffer_bytes, sent) -> None:
    """The peer may fail its own request; it can't reach another, or end the receiver."""
    config = dataclasses.replace(
        TransferConfig(lease_s=2.0, transfer_timeout_s=2.0, handshake_timeout_s=HANG_S),
        buffer_bytes=buffer_bytes,
    )

    async def run() -> None:
        node = await ReceiverNode(layout(), config).start()
        sender = SenderNode(layout(), config)
        node.manager.admit("r", PAGES, TOKENS)
        session = await sender.open("r", node.address, node.identity, PAGES, TOKENS)
        await session.opened()
        peer = await asyncio.wrap_future(sender.transport.connect(node.transport.metadata()))
        for payload in sent:
            await asyncio.wrap_future(sender.transport.notify(peer, payload))
        await session.abort("hostile")
        async with asyncio.timeout(HANG_S):
            await node.manager.release("r")
        await check(node, sender)
        await sender.close()
        await node.close()

    asyncio.run(run())
