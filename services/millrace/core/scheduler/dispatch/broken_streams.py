"""Tells instances that died from instances whose stream to the scheduler broke.

Both look alike at first: the stream ends, and the requests that were computed there are tried
again. An instance that then registers as the same incarnation was alive, so the requests get back
the attempts that they made there, at most `MOST_RETURNED` each: streams that break more often
probably break by the request. An instance that was silent until its lease lapsed gives none back: a
request may have made it hang.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from millrace.core.kv.transfer import Incarnation
from millrace.core.live_request import LiveRequest
from millrace.core.scheduler.events import InstanceJoined, InstanceLeft
from millrace.core.scheduler.request_table import RequestTable

#: A request gets back so many attempts.
MOST_RETURNED: Final = 4


class BrokenStreams:
    """The attempts that ended with the streams of instances which may come back."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._attempts: dict[Incarnation, list[LiveRequest]] = {}

    def ended(self, event: InstanceLeft, tried: Iterable[LiveRequest]) -> None:
        """Notes the requests whose attempts ended with a stream, and count."""
        if not event.silent and (open_requests := [one for one in tried if self._is_open(one)]):
            incarnation = Incarnation(event.instance_id, event.generation)
            self._attempts[incarnation] = open_requests

    def registered(self, event: InstanceJoined) -> None:
        """Gives the attempts back if the incarnation is the same; forgets earlier incarnations."""
        for incarnation in [one for one in self._attempts if one.id == event.instance_id]:
            tried = self._attempts.pop(incarnation)
            if incarnation.generation == event.generation:
                for request in filter(self._is_open, tried):
                    if request.returned_attempts < MOST_RETURNED:
                        request.return_attempt()

    def prune(self) -> None:
        """Forgets the requests that have ended."""
        for incarnation, tried in list(self._attempts.items()):
            if not any(map(self._is_open, tried)):
                del self._attempts[incarnation]

    def _is_open(self, request: LiveRequest) -> bool:
        return self._table.requests.get(request.id) is request
