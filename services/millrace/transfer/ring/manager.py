"""K/V transfers inside SP groups (Tetris section 4.1): round the ring, and history given before it.

A prefill instance has one RingManager, a request's attempt has one GroupLink, and a chunk on
several instances has one ChunkLink.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from millrace.core.config import TransferConfig
from millrace.core.errors import IntegrityError, TransferError
from millrace.core.kv.layout import KvLayout
from millrace.transfer.ring.chunk_link import ChunkLink, PeerInfo
from millrace.transfer.ring.group_link import GroupLink
from millrace.transfer.ring.messages import RING_CHANNEL, RingKind, RingMessage
from millrace.transfer.ring.page_runs import check_alike
from millrace.transfer.ring.recent import Recent
from millrace.transfer.transport.base import Transport

__all__ = ["ChunkLink", "GroupLink", "PeerInfo", "RingManager"]

#: The most requests with messages that came before the request was opened here.
MAX_EARLY = 1024
_KEPT_EARLY = (RingKind.CREDIT, RingKind.OFFER, RingKind.ABORT)

_Key = tuple[str, int]


class RingManager:
    """Opens group links; one per prefill instance. `region` is its pool's, with the given
    `layout`.
    """

    def __init__(
        self, transport: Transport, layout: KvLayout, region: int, config: TransferConfig
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._region = region
        self._config = config
        self._lock = threading.Lock()
        self._links: dict[_Key, GroupLink] = {}
        self._early: dict[_Key, list[tuple[str, RingMessage]]] = {}
        self._closed: Recent[_Key] = Recent()
        transport.subscribe(RING_CHANNEL, self._on_notification)

    def open(
        self,
        request_id: str,
        attempt: int,
        me: PeerInfo,
        peers: Mapping[str, PeerInfo],
        on_abort: Callable[[str], None],
    ) -> GroupLink:
        """Opens the group's link, until its `close` returns. `peers`: the other members, by
        instance id.

        The transport is connected to all of them. `on_abort` gets the reason, on any thread, when
        the link ends with an error. Raises TransferError for a member whose pages differ from ours,
        and for an attempt that was opened before.
        """
        key = (request_id, attempt)
        for peer in peers.values():
            check_alike(self._layout, peer.layout, peer.instance_id)
        if me.layout != self._layout or me.region != self._region:
            raise TransferError(f"request {request_id}: {me.instance_id} is not this instance")
        with self._lock:
            if key in self._links or key in self._closed:
                raise TransferError(f"request {request_id}: attempt {attempt} was opened before")
            link = self._links[key] = GroupLink(
                key=key,
                me=me,
                peers=peers,
                transport=self._transport,
                lease_s=self._config.lease_s,
                on_abort=on_abort,
                on_over=self._on_over,
            )
            early = self._early.pop(key, [])
        for name, message in early:
            link.take(name, message)
        return link

    def check_integrity(self) -> None:
        """Raises IntegrityError when a link was left open: call this when idle."""
        if self._links:
            raise IntegrityError(f"links inside groups are still open: {sorted(self._links)}")

    def _on_over(self, link: GroupLink) -> None:
        with self._lock:
            del self._links[link.key]
            self._closed.add(link.key)

    def _on_notification(self, peer: str, payload: bytes) -> None:
        """Handles a member's notification, on the transport's thread. One that can't be read breaks
        every link with that member, here and there: it may have been about any of them, also about
        one that is not open here yet.
        """
        try:
            message = RingMessage.decode(payload)
        except TransferError as error:
            self._break_links(peer, str(error))
            unread = RingMessage(kind=RingKind.UNREAD, request_id="", attempt=0)
            self._transport.notify(peer, unread.encode())
            return
        if message.kind is RingKind.UNREAD:
            self._break_links(peer, "what it got is not a notification of a ring")
            return
        with self._lock:
            link = self._links.get(message.key)
            if link is None:
                self._keep_early(peer, message)
        if link is not None:
            link.take(peer, message)
        elif message.kind is RingKind.ABORT:  # nothing is in flight, now or later
            answer = RingMessage(
                kind=RingKind.DRAINED, request_id=message.request_id, attempt=message.attempt
            )
            self._transport.notify(peer, answer.encode())

    def _break_links(self, peer: str, why: str) -> None:
        with self._lock:
            open_links = list(self._links.values())
        for link in open_links:
            link.misheard(peer, why)

    def _keep_early(self, peer: str, message: RingMessage) -> None:
        """Keeps a message that came before the link was opened, or after the member gave it up."""
        if message.kind not in _KEPT_EARLY or message.key in self._closed:
            return
        early = self._early.setdefault(message.key, [])
        if message.kind is RingKind.ABORT:
            early[:] = [(sender, kept) for sender, kept in early if sender != peer]
        early.append((peer, message))
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]
