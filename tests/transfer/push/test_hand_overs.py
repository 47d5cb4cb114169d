"""Messages of two threads to the event loop at one moment, and a session whose owner is
cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque

import pytest

from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.transfer.push import inbox as inbox_module
from millrace.transfer.push.inbox import Inbox
from millrace.transfer.push.messages import TO_SENDER, Kind, Message
from millrace.transfer.push.send import session as session_module
from millrace.transfer.push.send.session import SendSession
from support.deadlines import HANG_S, eventually
from support.kv_group import RECEIVER, KvGroup, Member
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
