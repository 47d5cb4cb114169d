"""One request's K/V between the members of its SP group, at one of the members.

The transport's thread handles notifications: it forwards blocks and grants credits at once,
independent of compute. No member writes here without permission: a credit, a WANT or a call of
decode comes first, so the set of possible writers is always known. WANT answers OFFER because a
giver that is not yet linked to this member could not report that its writes have drained.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

from millrace.core.errors import TransferError
from millrace.core.kv.sp_layout import ChunkShares
from millrace.transfer.ring.chunk_link import ChunkLink, PeerInfo
from millrace.transfer.ring.contacts import Contacts
from millrace.transfer.ring.giving import Giving, history_of
from millrace.transfer.ring.history import Gift
from millrace.transfer.ring.messages import KEPT, RingKind, RingMessage
from millrace.transfer.ring.quarantine import Quarantine
from millrace.transfer.transport.base import Transport

log = logging.getLogger(__name__)

#: Seconds between checks, while a link closes, for peers that may still write here.
TICK_S = 0.1

_Key = tuple[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A block in flight to the next member."""

    chunk: ChunkLink
    number: int
    nbytes: int


class GroupLink:
    """Moves the K/V of one request's attempt between the members, at one member.

    Made by `RingManager.open`. `bytes_sent` counts the bytes that went to other members, `given`
    has the history among them.
    """

    def __init__(
        self,
        *,
        key: _Key,
        me: PeerInfo,
        peers: Mapping[str, PeerInfo],
        transport: Transport,
        lease_s: float,
        on_abort: Callable[[str], None],
        on_over: Callable[[GroupLink], None],
    ) -> None:
        self.key = key
        self.changed = threading.Condition()  # guards all fields below, and the chunks' flows
        self.bytes_sent = 0
        self.given: list[Gift] = []
        self._me = me
        self._members = {**peers, me.instance_id: me}
        self._transport = transport
        self._lease_s = lease_s
        self._on_abort = on_abort
        self._on_over = on_over
        self._contacts = Contacts(
            transport, key, [peer.peer for peer in peers.values()], lease_s, self._on_sent
        )
        self._chunks: dict[int, ChunkLink] = {}
        self._opened: set[tuple[str, int]] = set()  # peers whose buffers are open for a chunk
        self._giving = Giving(me.layout.layers)
        self._gifts: dict[Gift, None] = {}
        self._writes: dict[Future[None], _Block] = {}
        self._aborted = False
        self.broken_by = ""  # why the link has ended itself; set before its waits end
        self._to_drain: set[str] = set()  # peers that wait for our DRAINED
        self._quarantine: Quarantine | None = None  # set by an abort
        self._wake: Callable[[], object] = lambda: None  # wakes the caller of `close`
        self._listening = ExitStack()
        self._listening.enter_context(transport.listening())

    # -- for the owner

    def chunk(
        self, shares: ChunkShares, after_device: Callable[[Callable[[], None]], None]
    ) -> ChunkLink:
        """Opens the ring of a chunk on several instances. `after_device` runs a call after the
        device.

        Raises TransferError when pages or buffers of the group can't hold the chunk.
        """
        members = tuple(self._members[instance_id] for instance_id in shares.group)
        rank = shares.group.index(self._me.instance_id)
        link = ChunkLink(self, shares, members, rank, after_device)
        with self.changed:
            if link.index in self._chunks:
                raise TransferError(f"chunk {link.index} of request {self.key[0]} has a link")
            self._chunks[link.index] = link
            if (link.next.peer, link.index) in self._opened:
                link.flow.credit(0)
        return link

    def exchange(self, shares: ChunkShares) -> None:
        """Offers the history that this member will give before a chunk, and expects the history
        that it will receive: the pages for it are free.
        """
        me, chunk = self._me.instance_id, shares.chunk.index
        receivers = {move.receiver for move in shares.moves if move.giver == me}
        givers = {move.giver for move in shares.moves if move.receiver == me}
        with self.changed:
            for giver in sorted(givers):
                self._giving.arrivals.expect(self._members[giver].peer, chunk)
            self._say_wants()
            for receiver in sorted(receivers):
                if not self._aborted:
                    self._contacts.tell(self._members[receiver].peer, RingKind.OFFER, chunk)

    def give(self, shares: ChunkShares) -> None:
        """Gives the history before a chunk, which this member has computed, to every member that
        wants it.
        """
        chunk = shares.chunk.index
        own = [move for move in shares.moves if move.giver == self._me.instance_id]
        with self.changed:
            for receiver in dict.fromkeys(move.receiver for move in own):
                member = self._members[receiver]
                moves = [move for move in own if move.receiver == receiver]
                self._giving.give(chunk, history_of(moves, self._me, member))
        self.pump()

    def fetched(self, peer: str) -> None:
        """Expects an earlier attempt's KV from decode, the transport's `peer`.

        Call it before decode is asked: from then on that peer may write here.
        """
        with self.changed:
            self._giving.arrivals.expect(peer, KEPT)
            self._contacts.add(peer)

    def history(self, layer: int) -> bool:
        """Waits until all wanted or fetched history of a layer has arrived. Returns False when
        aborted.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._aborted or self._giving.arrivals.has(layer))
            return not self._aborted

    def abort(self) -> None:
        """Ends all waits with False and drops all queued writes. Any thread may call it at any
        time.
        """
        with self.changed:
            if self._aborted:
                return
            self._aborted = True
            writers = self._giving.writers()
            writers |= {c.previous.peer for c in self._chunks.values() if c.may_be_written}
            self._quarantine = quarantine = Quarantine(
                self._transport,
                self._contacts.message(RingKind.ABORT),
                {peer: self._contacts.sent_s(peer) for peer in writers},
                self._lease_s,
            )
            writes, gifts, peers = list(self._writes), list(self._gifts), list(self._contacts)
        quarantine.ask(peers)
        for write in writes:
            write.cancel()  # writes that the transport has not posted yet
        for gift in gifts:
            gift.stop()
        self.pump()

    async def close(self) -> None:
        """Returns when nothing of the request is in flight, in or out: its pages may be freed.

        Without an abort it waits until all published blocks and all history to give have gone.
        After an abort it waits until each possible writer has drained, is dead, or is unreachable
        and its right to write has run out.
        """
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        self._wake = partial(loop.call_soon_threadsafe, changed.set)
        try:
            while not self._settled():
                with suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await changed.wait()
                changed.clear()
                if self._quarantine is not None:
                    self._quarantine.check()
        finally:
            self._wake = lambda: None
        self._listening.close()
        self._on_over(self)

    # -- for the chunks' links

    @property
    def is_aborted(self) -> bool:
        return self._aborted

    def pump(self) -> None:
        """Sends all blocks and messages that may go now, and wakes waiting threads."""
        posted: list[Future[None]] = []
        gifts: list[Gift] = []
        with self.changed:
            if not self._aborted:
                for chunk in self._chunks.values():
                    self._open_buffers(chunk)
                    self._give_credit(chunk)
                    posted += self._send_blocks(chunk)
                gifts = self._start_gifts()
            self._say_drained()
            self.changed.notify_all()
        for write in posted:
            write.add_done_callback(self._written)
        for gift in gifts:
            gift.over.add_done_callback(partial(self._given, gift))
        self._wake()

    # -- for the manager

    def take(self, peer: str, message: RingMessage) -> None:
        """Takes a notification, on the transport's thread."""
        with self.changed:
            if peer not in self._contacts:
                log.debug("%s of %s, which is in no group of %s", message.kind, peer, self.key)
                return
            self._contacts.heard(peer)
            gifts = [gift for gift in self._gifts if gift.peer == peer]
            wrong = self._read(peer, message)
        for gift in gifts:
            gift.heard()
        if message.kind is RingKind.ABORT:
            wrong = f"{self.name_of(peer)} gave up"
        if wrong:
            self._fail(wrong)
        self.pump()

    def misheard(self, peer: str, why: str) -> None:
        """Takes note of a notification to or from `peer` that was not read, on the transport's
        thread.
        """
        with self.changed:
            is_peers = peer in self._contacts
        if is_peers:
            self._fail(f"{self.name_of(peer)}: {why}")
            self.pump()

    # -- inside; all under the lock except `_fail` and the ends of writes

    def _read(self, peer: str, message: RingMessage) -> str:
        """Takes a message in. Returns the error in it, or ""."""
        kind, chunk, number = message.kind, message.chunk, message.number
        if kind is RingKind.ABORT:
            self._to_drain.add(peer)
        elif kind is RingKind.DRAINED and self._quarantine is not None:
            self._quarantine.drained(peer)
        if self._aborted:
            return ""
        try:
            self._take_in(peer, kind, chunk, number)
        except (ValueError, KeyError) as error:
            return f"{self.name_of(peer)}: {kind.name} {number} of chunk {chunk}: {error}"
        return ""

    def _take_in(self, peer: str, kind: RingKind, chunk: int, number: int) -> None:
        """Takes a valid message in. Raises ValueError or KeyError for an impossible message."""
        match kind:
            case RingKind.BLOCK:
                self._chunks[chunk].flow.arrived(number)
            case RingKind.CREDIT:
                self._credit(peer, chunk, number)
            case RingKind.LAYER:
                self._giving.arrivals.arrived(peer, chunk, number)
            case RingKind.OFFER:
                self._giving.offered(peer, chunk)
                self._say_wants()
            case RingKind.WANT:
                self._giving.wanted(peer, chunk)
            case RingKind.RENEW:
                self._contacts.tell(peer, RingKind.ALIVE)
            case _:
                pass  # of its end

    def _say_wants(self) -> None:
        if not self._aborted:
            for peer, chunk in self._giving.next_calls():
                self._contacts.tell(peer, RingKind.WANT, chunk)

    def _credit(self, peer: str, chunk: int, count: int) -> None:
        link = self._chunks.get(chunk)
        if link is None:
            self._opened.add((peer, chunk))
        elif link.next.peer != peer:
            raise ValueError("it is not the next in the ring")
        else:
            link.flow.credit(count)

    def _open_buffers(self, chunk: ChunkLink) -> None:
        """Opens our buffers for a chunk once no block of another chunk is in them or will come."""
        others = (other for other in self._chunks.values() if other is not chunk and other.begun)
        if chunk.begun and not chunk.flow.is_open and all(other.flow.is_idle for other in others):
            chunk.flow.open_buffers()

    def _give_credit(self, chunk: ChunkLink) -> None:
        if (count := chunk.flow.next_credit()) is not None:
            self._contacts.tell(chunk.previous.peer, RingKind.CREDIT, chunk.index, count)

    def _send_blocks(self, chunk: ChunkLink) -> list[Future[None]]:
        posted = []
        peer = chunk.next.peer
        while self._contacts.may_write(peer) and (block := chunk.next_send()) is not None:
            number, runs = block
            payload = self._contacts.message(RingKind.BLOCK, chunk.index, number).encode()
            if len(runs):
                here, there = self._me.region, chunk.next.region
                write = self._transport.write(peer, runs, payload, region=here, peer_region=there)
            else:
                write = self._transport.notify(peer, payload)
            self._writes[write] = _Block(chunk, number, runs.total_bytes)
            posted.append(write)
        return posted

    def _start_gifts(self) -> list[Gift]:
        started = []
        for chunk, history in self._giving.next_gifts():
            message = self._contacts.message(RingKind.LAYER, chunk)
            heard_s = self._contacts.heard_s(history.peer)
            started.append(
                Gift(self._transport, history, message, lease_s=self._lease_s, heard_s=heard_s)
            )
        self._gifts.update(dict.fromkeys(started))
        return started

    def name_of(self, peer: str) -> str:
        """Returns the instance of a transport; decode has only its transport's name."""
        return next((m.instance_id for m in self._members.values() if m.peer == peer), peer)

    def _say_drained(self) -> None:
        busy = {write.chunk.next.peer for write in self._writes.values()}
        busy |= {gift.peer for gift in self._gifts}
        for peer in self._to_drain - busy:
            self._contacts.tell(peer, RingKind.DRAINED)
        self._to_drain &= busy

    # -- ends, outside of the lock

    def _written(self, write: Future[None]) -> None:
        """Runs on the transport's thread, or on an aborting thread for a write that was not
        posted.
        """
        error = None if write.cancelled() else write.exception()
        with self.changed:
            block = self._writes.pop(write)
            if not write.cancelled() and error is None:
                self.bytes_sent += block.nbytes
                block.chunk.flow.written(block.number)
        if error is not None:
            self._fail(str(error))
        self.pump()

    def _on_sent(self, kind: RingKind, chunk: int, sent: Future[None]) -> None:
        """Fails the group when a message could not be sent: its receiver would wait for ever.

        The last credits of a chunk don't count: no block waits for them, and the member may have
        left.
        """
        needed = kind is not RingKind.CREDIT or self._chunks[chunk].may_be_written
        if needed and not sent.cancelled() and (error := sent.exception()) is not None:
            self._fail(str(error))
            self.pump()

    def _given(self, gift: Gift, over: Future[None]) -> None:
        with self.changed:
            del self._gifts[gift]
            self.bytes_sent += gift.bytes_sent
            self.given.append(gift)
        if (error := over.exception()) is not None:
            self._fail(str(error))
        self.pump()

    def _fail(self, reason: str) -> None:
        """Ends the link with an error of its own."""
        with self.changed:
            if self._aborted:
                return
            self.broken_by = reason
        self.abort()
        self._on_abort(reason)

    # -- closing

    def _settled(self) -> bool:
        with self.changed:
            if self._writes or self._gifts:
                return False
            if self._quarantine is not None:
                return self._quarantine.is_over()
            rings = all(chunk.flow.is_idle for chunk in self._chunks.values())
            return rings and self._giving.is_over
