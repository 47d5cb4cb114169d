"""The requests that a decode instance holds, and which of them wait for the next step boundary."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from millrace.decode.request import DecodeRequest


class RequestTable:
    """Used from the event loop only. Changes to the batch wait here until no step runs."""

    def __init__(self) -> None:
        self._requests: dict[str, DecodeRequest] = {}
        self._emptied = asyncio.Event()
        self.joining: deque[DecodeRequest] = deque()
        self.leaving: list[DecodeRequest] = []
        self.wake = asyncio.Event()  # set when the next boundary has something to do

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[DecodeRequest]:
        """Of those that are held now; they may go meanwhile."""
        return iter(list(self._requests.values()))

    def get(self, request_id: str) -> DecodeRequest | None:
        """The request, ended or not."""
        return self._requests.get(request_id)

    def live(self, request_id: str) -> DecodeRequest | None:
        """The request, unless it has ended."""
        request = self._requests.get(request_id)
        return None if request is None or request.ended else request

    def add(self, request: DecodeRequest) -> None:
        self._requests[request.id] = request

    def remove(self, request: DecodeRequest) -> None:
        """Nothing of it is held any more: what it held is for others."""
        del self._requests[request.id]
        self._emptied.set()
        self.wake.set()

    def counts(self) -> tuple[int, int]:
        """Requests that have joined the batch, and those on their way."""
        running = sum(r.joined for r in self._requests.values())
        return running, len(self._requests) - running

    def join_if_ready(self, request: DecodeRequest) -> None:
        """Puts it in line for the batch once all it needs is here."""
        if request.can_join and not request.joined:
            request.joined = True
            request.away_since_s = request.clock.now_s()
            self.joining.append(request)
            self.wake.set()

    def leave(self, request: DecodeRequest) -> None:
        """Ends it: it leaves the batch at the next boundary, and then frees what it holds."""
        if not request.ended:
            request.ended = True
            self.leaving.append(request)
            self.wake.set()

    async def wait_idle(self) -> None:
        """Returns when no request is held."""
        while self._requests:
            self._emptied.clear()
            await self._emptied.wait()
