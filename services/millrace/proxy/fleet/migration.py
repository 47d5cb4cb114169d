"""Migrates requests to other instances, or fails those that may not be migrated again."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from millrace.proxy.errors import ApiError
from millrace.proxy.fleet.records import Records
from millrace.proxy.fleet.scheduler_link import SchedulerLink
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.metrics import ModelMetrics

log = logging.getLogger(__name__)

#: A request is migrated after at most this many lost instances. A request that loses more
#: instances probably causes the losses.
MOST_LOSSES = 3
#: The most migrations of a request: while a pool is replaced, its next instance may leave, too.
#: Migrations for lack of memory are not counted: each incarnation generates at least one token.
MOST_MOVES = 16

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
        *,
        submit: Callable[[ProxyRequest], Awaitable[None]],
        fail: FailRequest,
    ) -> None:
        self._live = live
        self._scheduler = scheduler
        self._records = records
        self._metrics = metrics
        self._submit = submit
        self._fail = fail

    def lose(self, request: ProxyRequest, error: ApiError) -> None:
        """Migrates a request whose instance or whose tokens are lost."""
        request.losses += 1
        if request.losses > MOST_LOSSES:
            self._fail(request, error, cancel=True)
        else:
            self.move(request, error, "lost")

    def move(self, request: ProxyRequest, error: ApiError, reason: str) -> None:
        """Migrates a request to another instance; fails it with `error` if that is impossible."""
        before = request.spec.request_id
        moves = request.moves - request.preemptions
        if not request.may_move or moves >= MOST_MOVES:
            self._fail(request, error, cancel=True)
            return
        self._scheduler.cancel(before, "it is migrated")
        del self._live[before]
        request.move(time.monotonic())
        self._live[request.spec.request_id] = request
        self._metrics.moved(reason)
        log.info(
            "request %s is migrated as %s after %d tokens: %s",
            before,
            request.spec.request_id,
            request.spec.resumed_tokens,
            error.message,
            extra=request.about(),
        )
        self._records.spawn(self._go_on(request, before))

    async def _go_on(self, request: ProxyRequest, before: str) -> None:
        """Submits a request's next incarnation; the store has it before the former one ends."""
        try:
            if not request.has_ended:  # the client may have left meanwhile
                await self._submit(request)
        except ApiError as error:
            if not request.has_ended:
                self._fail(request, error, cancel=False)
        finally:
            self._records.finish(before, "cancelled", kept=request.kept)
