"""Migrates requests to other instances, or fails those that may not be migrated again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from millrace.core.backoff import Backoff
from millrace.proxy.errors import ID_TAKEN, ApiError
from millrace.proxy.fleet.records import Records
from millrace.proxy.fleet.scheduler_link import SchedulerLink
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.metrics import ModelMetrics

log = logging.getLogger(__name__)

#: The most migrations of a request: while a pool is replaced, its next instance may leave, too.
#: The scheduler ends a request earlier if instances die of it (`core.scheduler.dispatch.suspects`).
#: Migrations for lack of memory are not counted: each incarnation generates at least one token.
MOST_MOVES = 16

#: Between attempts to write a record, and before a prompt that was not read is written again.
RETRY = Backoff(0.1, 1.0)

LOST = "The instance that generated this answer was lost."
BROKEN = "The stream of generated tokens broke."


class FailRequest(Protocol):
    """Ends a request by an error; with `cancel` the scheduler is told."""

    def __call__(self, request: ProxyRequest, error: ApiError, *, cancel: bool) -> None: ...


class Migration:
    """Begins the next incarnations of requests. `live` has the open requests by the id that the
    other services use.
    """

    def __init__(
        self,
        live: dict[str, ProxyRequest],
        scheduler: SchedulerLink,
        records: Records,
        metrics: ModelMetrics,
        request_timeout_s: float,
        *,
        submit: Callable[[ProxyRequest], Awaitable[None]],
        fail: FailRequest,
        retry: Backoff = RETRY,
    ) -> None:
        """A request that waits for the store does so until `request_timeout_s` after its
        arrival.
        """
        self._live = live
        self._scheduler = scheduler
        self._records = records
        self._metrics = metrics
        self._request_timeout_s = request_timeout_s
        self._submit = submit
        self._fail = fail
        self._retry = retry

    def adopt(self, request: ProxyRequest, incarnation: str) -> None:
        """Continues a request with an `adoption`, which another replica has submitted as
        `incarnation`.
        """
        deaths = request.spec.deaths
        request.spec = replace(request.spec, request_id=incarnation)
        self._live[incarnation] = request
        self.move(request, ApiError(500, LOST, code="failed"), "adopted")
        request.suspect(deaths)  # still: its tokens may be of earlier incarnations

    def lose(self, request: ProxyRequest, error: ApiError) -> None:
        """Migrates a request whose instance or whose tokens are lost."""
        lost, known = request.decode, request.spec.deaths
        if lost is not None and lost not in known:
            request.suspect((*known, lost))
        self.move(request, error, "lost")

    def rewrite(self, request: ProxyRequest, error: ApiError) -> None:
        """Writes the prompt of a request again: the store lost it, or an instance did not reach the
        store. Waits before the second time and longer before each further time.
        """
        request.rewrites += 1
        wait_s = self._retry.pause_s(request.rewrites - 2) if request.rewrites > 1 else 0.0
        self.move(request, error, "unread", wait_s)

    def move(
        self, request: ProxyRequest, error: ApiError, reason: str, wait_s: float = 0.0
    ) -> None:
        """Migrates a request to another instance, after `wait_s`; fails it with `error` if that is
        impossible.
        """
        before = request.spec.request_id
        if request.moves - request.preemptions >= MOST_MOVES:
            self._fail(request, error, cancel=True)
            return
        self._scheduler.cancel(before, "it is migrated")
        del self._live[before]
        self._metrics.moved(reason)
        following = request.move(time.monotonic())
        for one in following:
            self._enter(one)
            log.info(
                "request %s is migrated as %s after %d tokens: %s",
                before,
                one.spec.request_id,
                one.spec.resumed_tokens,
                error.message,
                extra=one.about(),
            )
        self._records.spawn(self._go_on(following, before, wait_s))

    def _enter(self, request: ProxyRequest) -> None:
        while request.spec.request_id in self._live:
            request.rename()
        self._live[request.spec.request_id] = request

    def _rename(self, request: ProxyRequest) -> None:
        """Gives an incarnation whose name the store has of another request the next name."""
        before = request.spec.request_id
        del self._live[before]
        request.rename()
        self._enter(request)
        log.info("%s is taken: now %s", before, request.spec.request_id, extra=request.about())

    async def _go_on(self, following: list[ProxyRequest], before: str, wait_s: float) -> None:
        """Submits a request's next incarnations; the store has all before the former one ends."""
        try:
            await asyncio.sleep(wait_s)
            await asyncio.gather(*(self._submit_or_fail(one) for one in following))
        finally:
            self._records.finish(before, "cancelled", release=following[0].kept)

    async def _submit_or_fail(self, request: ProxyRequest) -> None:
        try:
            await self._submit_when_stored(request)
        except ApiError as error:
            if not request.has_ended:
                self._fail(request, error, cancel=False)

    async def _submit_when_stored(self, request: ProxyRequest) -> None:
        """Submits a request as soon as the store takes its record. Raises ApiError after its
        deadline.
        """
        for failures in itertools.count():
            if request.has_ended:  # the client left meanwhile
                return
            try:
                await self._submit(request)
            except ApiError as error:
                if error.code == ID_TAKEN and not request.has_ended:
                    self._rename(request)
                    continue
                age_s = time.monotonic() - request.arrived_at
                if not error.is_refusal or age_s > self._request_timeout_s:
                    raise
                await asyncio.sleep(self._retry.pause_s(failures))
            else:
                return
