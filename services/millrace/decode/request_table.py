"""Lists a decode instance's requests, and those that join or leave the batch between two steps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from millrace.decode.request import DecodeEvent, DecodeRequest


class RequestTable:
    """The requests of a decode instance. Used from the event loop only.

    Changes to the batch wait in `joining` and `leaving` until no step runs.
    """

    def __init__(self) -> None:
        self._requests: dict[str, DecodeRequest] = {}
        self._live: dict[str, DecodeRequest] = {}  # those that have not ended
        self._emptied = asyncio.Event()
        self.joining: deque[DecodeRequest] = deque()
        self.leaving: list[DecodeRequest] = []
        self.wake = asyncio.Event()  # set when the batch is to change

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[DecodeRequest]:
        """Iterates over a copy; requests may leave meanwhile."""
        return iter(list(self._requests.values()))

    def get(self, request_id: str) -> DecodeRequest | None:
        """The request, ended or not."""
        return self._requests.get(request_id)

    def live(self, request_id: str) -> DecodeRequest | None:
        """The request, unless it has ended."""
        return self._live.get(request_id)

    def add(self, request: DecodeRequest) -> None:
        self._requests[request.id] = self._live[request.id] = request

    def remove(self, request: DecodeRequest) -> None:
        """Removes a request after everything that it held was freed."""
        del self._requests[request.id]
        self._emptied.set()
        self.wake.set()

    def counts(self) -> tuple[int, int]:
        """Counts the requests that have joined the batch, and the others."""
        running = sum(r.joined for r in self._requests.values())
        return running, len(self._requests) - running

    def join_if_ready(self, request: DecodeRequest) -> None:
        """Puts the request into the queue for the batch when it has all that decode needs."""
        if request.can_join:
            request.advance(DecodeEvent.QUEUED)
            request.away_since_s = request.clock.now_s()
            self.joining.append(request)
            self.wake.set()

    def leave(
        self,
        request: DecodeRequest,
        event: DecodeEvent = DecodeEvent.ENDED,
        *,
        error: str = "",
    ) -> None:
        """Ends the request: it leaves the batch before the next step, and its memory is freed."""
        if request.id in self._live:
            request.advance(event)
            request.end_trace(error)
            del self._live[request.id]
            self.leaving.append(request)
            self.wake.set()

    async def wait_idle(self) -> None:
        """Returns when no request is held."""
        while self._requests:
            self._emptied.clear()
            await self._emptied.wait()
