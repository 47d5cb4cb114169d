"""Shares the memory of a decode instance among growing requests; preempts requests for pages.

With `scheduler.decode_reserve` grow, a request is admitted with pages for its prompt and the
headroom, and gets more pages while it is generated. When no page is left, the request with the
lowest priority by `priority_of` is preempted: its KV is copied to host memory, or, if host memory
is full, the request is migrated and its KV is computed again (vLLM's swap and recompute; Kwon et
al., SOSP 2023, section 4.5). A request is preempted only for requests of higher priority, so the
first request always progresses. A request that can preempt no other waits and keeps its pages.

Several choices share the pages of their prompt, but after a migration each has its own, and spread
requests belong to several instances: both have all their pages from the beginning. The choices of a
request leave together, and only to host memory.

Freed pages go to running requests first, then to preempted and waiting requests in order of
priority: no request overtakes another that waits for more pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from millrace.core.errors import IntegrityError
from millrace.decode.memory.priority import Priority, in_danger, priority_of
from millrace.decode.memory.request_pages import RequestPages
from millrace.decode.memory.swapping import Preempted, Swapper, slots_of
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.request import DecodeEvent, DecodeRequest, DecodeState
from millrace.decode.request_table import RequestTable
from millrace.engine.decode_batch import DecodeBatch

log = logging.getLogger(__name__)

_OUT_OF_BATCH: Final = (DecodeState.READY, DecodeState.PAUSED)  # with all KV in pages
_NEWEST_SHARE: Final = 0.2  # weight of the newest absence in the mean
_MOST_SPANS: Final = 64  # absences that one request's waterfall shows


class Waiting(Protocol):
    """The requests that wait for pages before their admission."""

    def waiting(self) -> list[DecodeRequest]: ...

    def wanted(self, request: DecodeRequest) -> int:
        """Returns the number of pages that a waiting request takes."""
        ...

    def let_in(self, request: DecodeRequest) -> None:
        """Admits a request; its pages must be free."""


class Preemption:
    """Gives pages to requests and preempts requests, between two steps, on the event loop."""

    def __init__(
        self,
        *,
        table: RequestTable,
        batch: DecodeBatch,
        pages: RequestPages,
        swapper: Swapper,
        waiting: Waiting,
        metrics: DecodeMetrics,
        move: Callable[[DecodeRequest], None],
    ) -> None:
        """`move` ends a request here; it is migrated, or begins again if it has no token."""
        self._table = table
        self._batch = batch
        self._pages = pages
        self._swapper = swapper
        self._waiting = waiting
        self._metrics = metrics
        self._move = move
        self._away: dict[str, Preempted] = {}
        self.mean_away_s = 0.0

    def priority(self, request: DecodeRequest) -> Priority:
        return priority_of(request, self.mean_away_s)

    # -- between two steps

    def make_room(self) -> None:
        """Gives every sequence of the batch the pages for its next step, then hands out the other
        free pages."""
        promised = self._grow_all()
        if self._away or self._waiting.waiting():
            self._bring_back(promised)

    def ready(self) -> list[Preempted]:
        """Lists the preempted requests that lack only room in the batch."""
        return [
            one
            for one in self._away.values()
            if one.request.state is DecodeState.PAUSED and not one.lacking()
        ]

    def back(self, preempted: Preempted) -> None:
        """Notes that a preempted request is in the batch again."""
        request = preempted.request
        del self._away[request.id]
        now_s, since_s = request.clock.now_s(), request.away_since_s
        request.away_since_s = None
        if since_s is not None:
            self.mean_away_s += _NEWEST_SHARE * (now_s - since_s - self.mean_away_s)
            self._note(request, since_s, "swap" if preempted.was_swapped else "wait")
        self._metrics.resumed.inc()

    def let_go(self, request: DecodeRequest) -> bool:
        """Forgets an ended request. Returns False while its KV is copied: call again later."""
        preempted = self._away.get(request.id)
        if preempted is None:
            return True
        if request.is_copying:
            return False
        del self._away[request.id]
        self._swapper.forget(preempted)
        return True

    @property
    def owed_pages(self) -> int:
        """Pages that preempted and waiting requests will take before any new request."""
        owed = sum(self._wanted(one) for one in self._away.values() if not one.request.ended)
        return owed + sum(map(self._waiting.wanted, self._waiting.waiting()))

    def check_integrity(self) -> None:
        """Raises IntegrityError for a preempted request that is unknown or in the batch, and for
        host memory that no request holds."""
        for request_id in self._away:
            if self._table.get(request_id) is None:
                raise IntegrityError(f"request {request_id} is preempted, but not here")
        if both := self._away.keys() & set(self._batch.requests()):
            raise IntegrityError(f"preempted, and in the batch: {sorted(both)}")
        self._swapper.check_integrity(slots_of(list(self._away.values())))

    # -- growth

    def _grow_all(self) -> int:
        """Gives pages to requests that need pages now, in order of priority. Returns the number of
        pages that stay promised."""
        wants = self._growing()
        if not wants:
            return 0
        if sum(sum(lacking.values()) for _, lacking in wants) > self._pages.free:
            self._batch.settle()  # tokens in flight may end sequences
            wants = self._growing()
        promised, coming = 0, self._coming()
        for request, lacking in sorted(wants, key=lambda want: self.priority(want[0])):
            if request.state not in (DecodeState.RUNNING, DecodeState.PAUSED):
                continue  # preempted for a request before it
            needed = sum(lacking.values())
            if needed <= self._pages.free - promised:
                self._grow(request, lacking)
                continue
            if request.state is DecodeState.RUNNING:
                self._pause(request)
                self._metrics.preempted.labels("wait").inc()
            promised += needed
            coming += self._make_way(request, promised - self._pages.free - coming)
        return promised

    def _growing(self) -> list[tuple[DecodeRequest, dict[int, int]]]:
        """Lists (request, pages that each choice lacks) in the batch or paused beside it."""
        found: dict[str, dict[int, int]] = {}
        for request_id, choice in self._batch.lacking():
            found.setdefault(request_id, {})[choice] = 1
        for request_id, one in self._away.items():
            if one.request.state is DecodeState.PAUSED and (lacking := one.lacking()):
                found[request_id] = lacking
        live = ((self._table.live(request_id), lacking) for request_id, lacking in found.items())
        return [(request, lacking) for request, lacking in live if request is not None]

    def _grow(self, request: DecodeRequest, lacking: dict[int, int]) -> None:
        preempted = self._away.get(request.id)
        for choice, count in lacking.items():
            pages = self._pages.grow(request, choice, count)
            if preempted is None:
                self._batch.grow(request.id, choice, pages)
        if preempted is not None:
            preempted.move_in()

    def _bring_back(self, promised: int) -> None:
        """Hands free pages to swapped and waiting requests, until a request needs too many."""
        spare = self._batch.size  # one per sequence, so that a return preempts nothing at once
        away = (one.request for one in self._away.values())
        swapped = [request for request in away if request.state is DecodeState.SWAPPED]
        for request in sorted(swapped + self._waiting.waiting(), key=self.priority):
            preempted = self._away.get(request.id)
            if preempted is not None:
                needed = self._wanted(preempted) + spare
                if needed > self._pages.free - promised:
                    return
                self._swapper.begin_in(preempted)
                continue
            needed = self._waiting.wanted(request)
            if needed > self._pages.free - promised:
                if in_danger(request, self.mean_away_s):
                    self._make_way(request, promised + needed - self._pages.free - self._coming())
                return
            self._waiting.let_in(request)

    def _wanted(self, preempted: Preempted) -> int:
        """Returns the number of pages that a preempted request needs to come back."""
        state = preempted.request.state
        if state is DecodeState.PAUSED:
            return sum(preempted.lacking().values())
        if state is DecodeState.SWAPPING_IN:
            return 0
        return preempted.shared_pages + sum(preempted.wanted_pages().values())

    # -- the choice of requests to preempt

    def _make_way(self, request: DecodeRequest, pages: int) -> int:
        """Preempts requests of lower priority, the lowest first, until `pages` pages will come
        free or no such request is left. Returns the number of pages that will come free."""
        coming = 0
        if pages <= 0:
            return coming
        self._batch.settle()
        mine = self.priority(request)
        lower = [one for one in self._victims() if self.priority(one) > mine]
        for victim in sorted(lower, key=self.priority, reverse=True):
            if coming >= pages:
                break
            pages_of_victim = len(victim.pages)
            if self._preempt(victim):
                coming += pages_of_victim
        return coming

    def _victims(self) -> Iterator[DecodeRequest]:
        """Yields requests whose whole KV is in pages here and can leave. Requests of several
        choices can't be migrated and need host memory. A request that has its last token is in no
        batch, and is released soon."""
        batch = set(self._batch.requests())
        for request in self._table:
            may_leave = request.sampling.n == 1 or len(request.pages) <= self._swapper.free_pages
            runs = request.state is DecodeState.RUNNING and request.id in batch
            if (runs or request.state in _OUT_OF_BATCH) and may_leave and not request.is_spread:
                yield request

    def _preempt(self, request: DecodeRequest) -> bool:
        """Preempts the request. Returns False when the request can't leave and keeps its pages."""
        preempted = self._pause(request)
        if self._swapper.begin_out(preempted):
            self._metrics.preempted.labels("swap").inc()
            return True
        if request.sampling.n > 1:
            return False
        del self._away[request.id]
        if request.away_since_s is not None:
            self._note(request, request.away_since_s, "recompute")
        self._metrics.preempted.labels("recompute").inc()
        self._move(request)
        return True

    def _pause(self, request: DecodeRequest) -> Preempted:
        """Takes a request out of the batch, or out of its waiting queue; its pages stay."""
        preempted = self._away.get(request.id)
        if preempted is None:
            if request.state is DecodeState.READY:
                self._table.joining.remove(request)
            sequences = self._batch.pause(request.id)
            request.advance(DecodeEvent.PAUSED)
            grows = self._pages.grows(request.spec)
            preempted = Preempted(request, sequences, self._pages.page_tokens, grows)
            self._away[request.id] = preempted
            request.away_since_s = request.clock.now_s()
        return preempted

    def _coming(self) -> int:
        """Returns the number of pages that copies and releases in flight will free."""
        return sum(
            len(request.pages)
            for request in self._table
            if request.ended or request.state is DecodeState.SWAPPING_OUT
        )

    def _note(self, request: DecodeRequest, since_s: float, kind: str) -> None:
        if sum(one.name == "preempted" for one in request.trace.spans) < _MOST_SPANS:
            request.trace.add("preempted", since_s, request.clock.now_s(), by=kind)
