"""Copies the KV of preempted requests between pages and host memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import CapacityError, IntegrityError
from millrace.decode.held_pages import HeldPages
from millrace.decode.memory.request_pages import RequestPages
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.request import DecodeEvent, DecodeRequest, DecodeState
from millrace.engine.decode_batch import PausedSequence
from millrace.engine.kv.host_swap import KvSwap
from millrace.instance.tasks import Tasks


@dataclass(slots=True, eq=False)
class Preempted:
    """A request that was taken out of the batch and will continue there unchanged."""

    request: DecodeRequest
    sequences: list[PausedSequence]  # empty: the request has not joined yet
    page_tokens: int
    grows: bool
    slots: list[int] = field(default_factory=list)  # in host memory; one per page that holds KV
    was_swapped: bool = False

    @property
    def shared_pages(self) -> int:
        return self.request.prompt_tokens // self.page_tokens

    def kv_pages(self) -> dict[int, int]:
        """The number of own pages that hold KV, per choice, without the shared pages.

        Before the request joins, only choice 0 has any: the other choices have no copy of the
        prompt's last page yet.
        """
        return self._own_pages(0)

    def lacking(self) -> dict[int, int]:
        """The number of pages in `wanted_pages` that the request does not hold, per choice."""
        held = self.request.pages.own
        wanted = {c: n - len(held.get(c, ())) for c, n in self.wanted_pages().items()}
        return {choice: count for choice, count in wanted.items() if count > 0}

    def wanted_pages(self) -> dict[int, int]:
        """The number of own pages that each choice needs before it may run again.

        These are the pages for its next token, or all pages if the request does not grow.
        """
        if self.grows:
            return self._own_pages(1)
        whole = self.request.prompt_tokens + self.request.sampling.max_tokens
        count = ceil_div(whole, self.page_tokens) - self.shared_pages
        choices = [p.sequence.choice for p in self.sequences] or range(self.request.sampling.n)
        return dict.fromkeys(choices, count)

    def _own_pages(self, more_tokens: int) -> dict[int, int]:
        if not self.sequences:
            tokens = {0: self.request.prompt_tokens}
        else:
            tokens = {paused.sequence.choice: paused.kv_tokens for paused in self.sequences}
        return {
            choice: ceil_div(count + more_tokens, self.page_tokens) - self.shared_pages
            for choice, count in tokens.items()
        }

    def move_in(self) -> None:
        """Points its sequences to the pages that the request holds now."""
        self.sequences = [
            replace(
                paused,
                sequence=replace(
                    paused.sequence, pages=self.request.pages.of_choice(paused.sequence.choice)
                ),
            )
            for paused in self.sequences
        ]


class Swapper:
    """Copies KV on its own thread; everything else runs on the event loop.

    `vacate` waits until no write to a request's pages is in flight; `wake` is called after a copy.
    """

    def __init__(
        self,
        swap: KvSwap,
        pages: RequestPages,
        tasks: Tasks,
        metrics: DecodeMetrics,
        *,
        vacate: Callable[[str], Awaitable[None]],
        wake: Callable[[], None],
    ) -> None:
        self._swap = swap
        self._pages = pages
        self._tasks = tasks
        self._metrics = metrics
        self._vacate = vacate
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode-swap")

    @property
    def free_pages(self) -> int:
        """Free pages of host memory."""
        return self._swap.free_pages

    def begin_out(self, preempted: Preempted) -> bool:
        """Begins to copy the KV to the host; the pages come free after the copy. Returns False
        when the host has no room."""
        own, request = preempted.kv_pages(), preempted.request
        try:
            preempted.slots = self._swap.reserve(preempted.shared_pages + sum(own.values()))
        except CapacityError:
            return False
        request.advance(DecodeEvent.SWAP_OUT_BEGAN)
        preempted.was_swapped = True
        self._tasks.spawn(self._out(preempted, _with_kv(request.pages, own)))
        return True

    def begin_in(self, preempted: Preempted) -> None:
        """Begins to copy the KV into pages again. If it raises CapacityError, it begins nothing."""
        own = preempted.wanted_pages()
        request = preempted.request
        request.pages = self._pages.allocate(preempted.shared_pages, own)
        request.advance(DecodeEvent.SWAP_IN_BEGAN)
        self._tasks.spawn(self._in(preempted, _with_kv(request.pages, preempted.kv_pages())))

    def forget(self, preempted: Preempted) -> None:
        """Frees the request's host memory. Not allowed while its KV is copied."""
        self._swap.release(preempted.slots)
        preempted.slots = []

    def check_integrity(self, used: int) -> None:
        """Raises IntegrityError unless exactly `used` slots are in use."""
        self._swap.check_integrity(expected_used=used)

    def close(self) -> None:
        """Waits for the running copy; later copies are cancelled."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _out(self, preempted: Preempted, pages: list[int]) -> None:
        await self._run(self._swap.swap_out, pages, preempted.slots)
        await self._vacate(preempted.request.id)
        self._pages.release(preempted.request)
        preempted.request.advance(DecodeEvent.COPIED)
        self._metrics.swapped_bytes.labels("out").inc(len(pages) * self._swap.page_bytes)
        self._wake()

    async def _in(self, preempted: Preempted, pages: list[int]) -> None:
        await self._run(self._swap.swap_in, preempted.slots, pages)
        self.forget(preempted)
        preempted.move_in()
        preempted.request.advance(DecodeEvent.COPIED)
        self._metrics.swapped_bytes.labels("in").inc(len(pages) * self._swap.page_bytes)
        self._wake()

    async def _run(
        self, copy: Callable[[list[int], list[int]], None], source: list[int], target: list[int]
    ) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, copy, source, target)


def _with_kv(pages: HeldPages, own: dict[int, int]) -> list[int]:
    """Lists the pages that hold KV: the shared pages, then `own` pages of each choice."""
    return [*pages.shared, *(p for choice, count in own.items() for p in pages.own[choice][:count])]


def slots_of(preempted: list[Preempted]) -> int:
    """Counts the host pages of the preempted requests. Raises IntegrityError for a request that
    holds both pages and host memory without a copy in flight."""
    for one in preempted:
        request = one.request
        if request.state is DecodeState.SWAPPED and len(request.pages):
            raise IntegrityError(f"request {request.id} is swapped out, and holds pages")
        if request.has_kv and one.slots:
            raise IntegrityError(f"request {request.id} is in its pages, and in host memory")
    return sum(len(one.slots) for one in preempted)
