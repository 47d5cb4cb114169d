"""Passes notifications from the transport's thread to the event loop, in order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from millrace.core.errors import TransferError
from millrace.transfer.push.messages import Message
from millrace.transfer.transport.base import Transport

log = logging.getLogger(__name__)


class Inbox:
    """Hands every message of one channel to `read(peer, message)` on the loop that made it.

    The loop is woken once for all waiting messages. A message that can't be decoded or read is
    logged.
    """

    def __init__(
        self, transport: Transport, channel: int, read: Callable[[str, Message], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._read = read
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._called = False  # whether the loop will soon read the waiting messages
        transport.subscribe(channel, self._on_notification)

    def _on_notification(self, peer: str, payload: bytes) -> None:
        """Queues a notification. Several threads of the transport may call it at once: then both
        may wake the loop, but never neither.
        """
        self._waiting.append((peer, payload))
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._read_all)

    def _read_all(self) -> None:
        self._called = False  # first: a message from here on wakes the loop again
        while self._waiting:
            peer, payload = self._waiting.popleft()
            try:
                self._read(peer, Message.decode(payload))
            except TransferError as error:
                log.warning("notification of %s: %s", peer, error)
