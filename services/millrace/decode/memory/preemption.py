"""Memory of a decode instance whose requests grow: who gets pages, and who gives them up.

With `scheduler.decode_reserve` grow a request is admitted with pages for its prompt and the
headroom, and gets more as it is generated. When there are none left, the request that goes last by
`priority_of` gives up its place: its KV is copied to host memory, or where that is full the request
moves and its KV is computed anew (vLLM's swap and recompute; Kwon et al., SOSP 2023, section 4.5).
A request gives way to those of higher priority alone, so that the first one always gets on. One
that finds nobody to give way waits in its pages.

Requests of several choices can't move, and spread ones are of several instances: both have all
their pages from the beginning. The choices of one leave together, for host memory alone.

Pages that come free go to those that run, then to who was preempted and who waits to be admitted,
in order of priority: nobody passes one by who waits for more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from millrace.core.errors import IntegrityError
from millrace.decode.memory.priority import Priority, in_danger, priority_of
from millrace.decode.memory.request_pages import RequestPages
from millrace.decode.memory.swapping import Place, Preempted, Swapper, slots_of
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.request import DecodeRequest
from millrace.decode.request_table import RequestTable
from millrace.engine.decode_batch import DecodeBatch
from millrace.instance.spans import span

log = logging.getLogger(__name__)

_NEWEST_SHARE: Final = 0.2  # of the last absence in the mean of all
_MOST_SPANS: Final = 64  # absences that one request's waterfall shows


class Waiting(Protocol):
    """Requests that wait for pages to be admitted with."""

    def waiting(self) -> list[DecodeRequest]: ...

    def let_in(self, request: DecodeRequest) -> None:
        """Admits a request, for which there are pages."""


class Preemption:
    """Works between two steps, on the event loop."""

    def __init__(
        self,
        *,
        instance_id: str,
        table: RequestTable,
        batch: DecodeBatch,
        pages: RequestPages,
        swapper: Swapper,
        waiting: Waiting,
        metrics: DecodeMetrics,
        move: Callable[[DecodeRequest], None],
    ) -> None:
        """`move` ends a request here, to go on elsewhere or anew."""
        self._id = instance_id
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

    # -- for the step boundary

    def make_room(self) -> None:
        """Sees to it that no sequence of the batch lacks a page for the next step, and hands out
        what is free beyond that."""
        promised = self._grow_all()
        if self._away or self._waiting.waiting():
            self._bring_back(promised)

    def ready(self) -> list[Preempted]:
        """Those that could run: only the batch may have no room for them."""
        return [
            one
            for one in self._away.values()
            if one.place is Place.PAGES and not one.request.ended and not one.lacking()
        ]

    def back(self, preempted: Preempted) -> None:
        """It is in the batch again."""
        request = preempted.request
        del self._away[request.id]
        now_s, since_s = request.clock.now_s(), request.away_since_s
        request.away_since_s = None
        if since_s is not None:
            self.mean_away_s += _NEWEST_SHARE * (now_s - since_s - self.mean_away_s)
            self._note(request, since_s, "swap" if preempted.was_swapped else "wait")
        self._metrics.resumed.inc()

    def let_go(self, request: DecodeRequest) -> bool:
        """Forgets a request that has ended. False while its KV is copied: ask again."""
        preempted = self._away.get(request.id)
        if preempted is None:
            return True
        if preempted.is_copying:
            return False
        del self._away[request.id]
        self._swapper.forget(preempted)
        return True

    @property
    def owed_pages(self) -> int:
        """That those out of memory, or yet to get in, will take before anyone else."""
        owed = sum(self._wanted(one) for one in self._away.values() if not one.request.ended)
        return owed + sum(self._pages.wanted(r.spec) for r in self._waiting.waiting())

    def check_integrity(self) -> None:
        """Raises IntegrityError for a preempted request that is gone or in the batch, or host
        memory that nobody holds."""
        for request_id in self._away:
            if self._table.get(request_id) is None:
                raise IntegrityError(f"request {request_id} is preempted, but not here")
        if both := self._away.keys() & set(self._batch.requests()):
            raise IntegrityError(f"preempted, and in the batch: {sorted(both)}")
        self._swapper.check_integrity(slots_of(list(self._away.values())))

    # -- growth

    def _grow_all(self) -> int:
        """Gives pages to those that need one now, in order. Returns how many stay promised."""
        wants = self._growing()
        if not wants:
            return 0
        promised, coming = 0, self._coming()
        for request, lacking in sorted(wants, key=lambda want: self.priority(want[0])):
            if request.ended or self._is_leaving(request):
                continue  # moved or swapped out for one before it
            needed = sum(lacking.values())
            if needed <= self._pages.free - promised:
                self._grow(request, lacking)
                continue
            if request.id not in self._away:
                self._pause(request)
                self._metrics.preempted.labels("wait").inc()
            promised += needed
            coming += self._make_way(request, promised - self._pages.free - coming)
        return promised

    def _growing(self) -> list[tuple[DecodeRequest, dict[int, int]]]:
        """(request, pages that each of its choices wants), in the batch or waiting beside it."""
        found: dict[str, dict[int, int]] = {}
        for request_id, choice in self._batch.lacking():
            found.setdefault(request_id, {})[choice] = 1
        for request_id, one in self._away.items():
            if one.place is Place.PAGES and (lacking := one.lacking()):
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
        """Hands free pages to those out of memory, as far as they go."""
        spare = self._batch.size  # one a sequence, so that a return is not the next one's loss
        back = [one for one in self._away.values() if one.place is Place.HOST]
        line = [one.request for one in back if not one.request.ended] + self._waiting.waiting()
        for request in sorted(line, key=self.priority):
            preempted = self._away.get(request.id)
            if preempted is not None:
                needed = self._wanted(preempted) + spare
                if needed > self._pages.free - promised:
                    return
                self._swapper.begin_in(preempted)
                continue
            needed = self._pages.wanted(request.spec)
            if needed > self._pages.free - promised:
                if in_danger(request, self.mean_away_s):
                    self._make_way(request, promised + needed - self._pages.free - self._coming())
                return
            self._waiting.let_in(request)

    def _wanted(self, preempted: Preempted) -> int:
        """Pages that a request needs to come back."""
        if preempted.place is Place.PAGES:
            return sum(preempted.lacking().values())
        if preempted.place is Place.RETURNING:
            return 0
        return preempted.shared_pages + sum(preempted.wanted_pages().values())

    # -- who gives way

    def _make_way(self, request: DecodeRequest, pages: int) -> int:
        """Preempts requests of lower priority, the lowest first, until so many pages are on their
        way to be free, or nobody is left. Returns how many are."""
        coming = 0
        if pages <= 0:
            return coming
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
        """Requests whose KV is here, whole, and can be elsewhere: those of several choices could
        not move. Who has had its last token is in no batch, and will be gone when that is out."""
        running = set(self._batch.requests()) | self._away.keys()
        running.update(request.id for request in self._table.joining)
        for request in self._table:
            if request.ended or request.is_spread or self._is_leaving(request):
                continue
            may_leave = request.sampling.n == 1 or len(request.pages) <= self._swapper.free_pages
            if request.id in running and may_leave:
                yield request

    def _is_leaving(self, request: DecodeRequest) -> bool:
        """Whether its pages are no more its own, or not yet."""
        preempted = self._away.get(request.id)
        return preempted is not None and preempted.place is not Place.PAGES

    def _preempt(self, request: DecodeRequest) -> bool:
        """False: it can't leave after all, and goes on where it is."""
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
        """Takes a request out of the batch, or out of the line for it, with its pages."""
        preempted = self._away.get(request.id)
        if preempted is None:
            sequences = self._batch.pause(request.id)
            if not sequences:
                self._table.joining.remove(request)
            grows = self._pages.grows(request.spec)
            preempted = Preempted(request, sequences, self._pages.page_tokens, grows)
            self._away[request.id] = preempted
            request.away_since_s = request.clock.now_s()
        return preempted

    def _coming(self) -> int:
        """Pages that will be free once copies and releases under way have ended."""
        leaving = (one for one in self._away.values() if one.place is Place.LEAVING)
        ended = (request for request in self._table if request.ended)
        return sum(len(one.request.pages) for one in leaving if not one.request.ended) + sum(
            len(request.pages) for request in ended
        )

    def _note(self, request: DecodeRequest, since_s: float, kind: str) -> None:
        if sum(one.name == "preempted" for one in request.spans) < _MOST_SPANS:
            now_s = request.clock.now_s()
            request.spans.append(span("preempted", self._id, since_s, now_s, by=kind))
