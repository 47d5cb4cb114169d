"""Messages of two threads to the event loop at one moment, a session whose owner is cancelled, and
a sender that gives up before its handshake is answered.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque

import pytest

from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.core.kv.transfer import HandshakeRefused
from millrace.transfer.push import inbox as inbox_module
from millrace.transfer.push.inbox import Inbox
from millrace.transfer.push.messages import TO_SENDER, Kind, Message
from millrace.transfer.push.receive.manager import ReceiveManager
from millrace.transfer.push.send import session as session_module
from millrace.transfer.push.send.session import SendSession
from support.deadlines import HANG_S, eventually
from support.kv_group import RECEIVER, KvGroup, LocalPeer, Member
from support.kv_nodes import layout
from support.memory_transport import MemoryHub, MemoryTransport

CONFIG = TransferConfig(lease_s=5.0, transfer_timeout_s=5.0, handshake_timeout_s=2.0)


class AtOnce(deque):
    """The first two threads that append both append before either continues."""

    def __init__(self) -> None:
        super().__init__()
        self._count = itertools.count()
        self._both = threading.Barrier(2)

    def append(self, item: object) -> None:
        super().append(item)
        if next(self._count) < 2:
            self._both.wait(HANG_S)


async def test_notifications_of_two_threads_at_once_are_read(monkeypatch):
    monkeypatch.setattr(inbox_module, "deque", AtOnce)
    transport, read = MemoryTransport("one", MemoryHub()), []
    Inbox(transport, TO_SENDER, lambda peer, message: read.append((peer, message.lease)))

    def deliver(peer: str, lease: int) -> None:
        message = Message(kind=Kind.RENEW, request_id="r", lease=lease, generation=1)
        transport.deliver(peer, message.encode())

    await asyncio.gather(*(asyncio.to_thread(deliver, name, i) for i, name in enumerate("ab")))
    await eventually(lambda: len(read) == 2)
    assert sorted(read) == [("a", 0), ("b", 1)]
    await asyncio.to_thread(deliver, "a", 2)
    await eventually(lambda: read[2:] == [("a", 2)])
    transport.close()


async def begun(group: KvGroup) -> tuple[Member, SendSession]:
    """Member a's session, with one write in flight until its gate opens, and one queued write."""
    member = group.members["a"]
    member.transport.gate.clear()
    session = await member.manager.open(
        "r", peer=member.peer, receiver=RECEIVER, prompt_tokens=40, pages=list(range(10))
    )
    await session.opened()
    session.layer_ready(0, 0, 0, 40)
    await eventually(lambda: member.transport.posted)
    session.layer_ready(0, 1, 0, 40)
    await eventually(lambda: [w.running() for w in member.transport.posted] == [True, False])
    return member, session


async def test_a_session_ends_when_a_write_ends_while_the_next_one_is_cancelled(monkeypatch):
    """One write ends on the transport's thread, the other on the loop."""
    monkeypatch.setattr(session_module, "deque", AtOnce)
    group = KvGroup(CONFIG, layout(page_tokens=16), {"a": layout(page_tokens=4, pages=96)})
    pages = group.admit("r", 40)
    member, session = await begun(group)
    member.transport.gate.set()
    async with asyncio.timeout(HANG_S):
        await session.abort("given up")
    await group.release("r", pages)
    await group.close()


async def test_a_session_ends_though_who_aborts_it_is_cancelled():
    group = KvGroup(CONFIG, layout(page_tokens=16), {"a": layout(page_tokens=4, pages=96)})
    pages = group.admit("r", 40)
    member, session = await begun(group)
    aborting = asyncio.create_task(session.abort("given up"))
    await asyncio.sleep(0.02)
    aborting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await aborting
    with pytest.raises(TransferError, match="given up"):
        await session.finish(None)
    assert member.manager.num_sessions
    member.transport.gate.set()
    await eventually(lambda: not member.manager.num_sessions)
    await group.release("r", pages)
    await group.close()


class Unheard(LocalPeer):
    """Its receiver answers no handshake before the sender gives up, and misses the first abort.
    Then it serves the handshake, which nobody waits for any more.
    """

    def __init__(self, manager: ReceiveManager) -> None:
        super().__init__(manager)
        self.late: asyncio.Task[object] | None = None
        self.aborts = 0

    async def handshake(self, ask, *, timeout_s):
        self.late = asyncio.create_task(self.manager.handshake(ask, HANG_S))
        await asyncio.get_running_loop().create_future()

    async def abort(self, ticket, *, reason, drained, timeout_s):
        self.aborts += 1
        if self.aborts == 1:
            raise TransferError("nobody answers")
        await super().abort(ticket, reason=reason, drained=drained, timeout_s=timeout_s)


async def given_up(group: KvGroup) -> Unheard:
    """A sender's session that is over, and whose handshake still waits at the receiver."""
    member = group.members["a"]
    peer = Unheard(group.manager)
    pages = list(range(10))
    session = await member.manager.open(
        "r", peer=peer, receiver=RECEIVER, prompt_tokens=40, pages=pages
    )
    await eventually(lambda: peer.late is not None)
    async with asyncio.timeout(HANG_S):
        await session.abort("given up")
    return peer


async def test_a_handshake_of_a_sender_that_gave_up_is_granted_nothing():
    group = KvGroup(CONFIG, layout(page_tokens=16), {"a": layout(page_tokens=4, pages=96)})
    peer = await given_up(group)
    await eventually(lambda: peer.aborts > 1)
    pages = group.admit("r", 40)
    with pytest.raises(HandshakeRefused, match="given up"):
        await peer.late
    assert not group.manager.num_leases
    await group.release("r", pages)
    await group.close()


async def test_an_abort_is_repeated_until_the_receiver_of_a_handshake_has_heard_it():
    """The sender does not know the receiver's transport, so it can't answer there."""
    group = KvGroup(CONFIG, layout(page_tokens=16), {"a": layout(page_tokens=4, pages=96)})
    pages = group.admit("r", 40)
    peer = await given_up(group)
    await peer.late
    await group.release("r", pages)  # once the lease is over
    assert peer.aborts > 1
    await group.close()


async def test_a_sender_that_gives_up_during_its_handshake_fails_the_request_there():
    group = KvGroup(CONFIG, layout(page_tokens=16), {"a": layout(page_tokens=4, pages=96)})
    ask = None

    class Caught(LocalPeer):
        async def handshake(self, asked, *, timeout_s):
            nonlocal ask
            ask = asked
            raise HandshakeRefused("not yet")

    member = group.members["a"]
    session = await member.manager.open(
        "r",
        peer=Caught(group.manager),
        receiver=RECEIVER,
        prompt_tokens=40,
        pages=list(range(10)),
    )
    await eventually(lambda: ask is not None)
    waiting = asyncio.create_task(group.manager.handshake(ask, HANG_S))
    await asyncio.sleep(0)  # it waits for the request
    pages = group.admit("r", 40)
    group.manager.abort(ask.ticket, reason="given up", drained=True)
    with pytest.raises(HandshakeRefused):
        await waiting
    kind, why, *_ = await group.event("r")
    assert kind == "failed" and "gave the transfer up: given up" in why
    await session.abort("given up")
    await group.release("r", pages)
    await group.close()
