"""Holds one model's requests in flight; gives them the scheduler's messages and their tokens."""

from __future__ import annotations

import asyncio
import logging
import time

from millrace.concurrency import cancel
from millrace.core.config import ProxyConfig
from millrace.core.errors import IntegrityError
from millrace.core.incarnation import Incarnation
from millrace.core.scheduler.effects import Fail, Refuse, Suspect
from millrace.proxy.errors import (
    ApiError,
    failure,
    id_taken,
    overloaded,
    refusal,
    unavailable,
    would_be_late,
)
from millrace.proxy.fleet.migration import BROKEN, LOST, Migration
from millrace.proxy.fleet.parking import LoadReport, Parking
from millrace.proxy.fleet.prompts_ahead import PromptsAhead
from millrace.proxy.fleet.records import Records
from millrace.proxy.fleet.scheduler_link import SchedulerLink
from millrace.proxy.fleet.token_intake import TokenIntake
from millrace.proxy.fleet.token_links import TokenLinks
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.generation.stage import Stage
from millrace.proxy.metrics import ModelMetrics
from millrace.state.leader import LeaderWatch
from millrace.state.store import LEASE_S, RequestStore
from millrace.wire.codec.request_spec import encode_spec
from millrace.wire.fleet_messages import Fleet, OpenRequest, Placed, Queued

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
RENEW_S = LEASE_S / 3  # between renewals of the requests' records

_NO_SCHEDULER = "The connection to the scheduler was lost."
_SHUTTING_DOWN = "The server is shutting down."
#: Why a request is cancelled that the scheduler goes on with: it had lost the instance from sight
#: that has sent the whole answer.
_ENDED = "its answer has ended"


class Gateway:
    """Owns every `ProxyRequest` from `submit` to its end. Used from the event loop only."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        leaders: LeaderWatch,
        store: RequestStore,
        config: ProxyConfig,
        request_timeout_s: float,
        metrics: ModelMetrics,
    ) -> None:
        """`request_timeout_s`: the scheduler's longest time from arrival to the last token."""
        self.incarnation = incarnation
        self._records = Records(store)
        self._config = config
        self._metrics = metrics
        self._live: dict[str, ProxyRequest] = {}  # by the id that the other services use
        #: Requests that have ended before their placement was heard, which is on its way.
        self._unheard: set[str] = set()
        self._leaders = leaders
        self._scheduler = SchedulerLink(leaders, incarnation, self)
        self._lost_at: float | None = None  # since when no scheduler answers; None: one does
        self._migration = Migration(
            self._live,
            self._scheduler,
            self._records,
            metrics,
            request_timeout_s,
            submit=self.submit,
            fail=self._fail,
        )
        self.intake = TokenIntake(
            self._live, self._migration, metrics, fail=self._fail, finish=self._finish
        )
        self._tokens = TokenLinks(incarnation, self.intake)
        self.prompts = PromptsAhead(self._scheduler.ask_progress)
        self.on_progress = self.prompts.take
        self.keep_trace = self._scheduler.keep_trace
        self._load = LoadReport(self._scheduler.report)
        self._request_timeout_s = request_timeout_s
        self._parking = Parking(config, self._load.set, request_timeout_s)
        self._tasks: list[asyncio.Task[None]] = []
        #: Set when the process shuts down: the gateway takes no new request.
        self.draining = False

    # -- start and end

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._leaders.run()),
            asyncio.create_task(self._scheduler.run()),
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._renew()),
        ]

    def drain(self) -> None:
        """Takes no new request, and ends the parked requests that no instance has begun."""
        self.draining = True
        for request in self._parking.shut():
            self._fail(request, unavailable(_SHUTTING_DOWN), cancel=False)

    async def close(self) -> None:
        """Cancels all requests, tells the scheduler and closes every stream."""
        self.drain()
        for request in list(self._live.values()):
            self._fail(request, unavailable(_SHUTTING_DOWN), cancel=True)
        await self._scheduler.flushed(2.0)
        self._load.close()
        await self._records.close(2.0)
        await cancel(*self._tasks)
        await self._tokens.close()

    @property
    def ready(self) -> bool:
        """Whether the fleet takes requests, or a request may wait here for a fleet.

        Parked requests start an empty fleet: clients must still send them here.
        """
        takes = self.fleet_ready or self._parking.is_open(time.monotonic())
        return self._has_scheduler and takes and not self.draining

    @property
    def _has_scheduler(self) -> bool:
        """Whether a scheduler answers, or has answered so lately that requests wait for the next
        one.
        """
        if self._scheduler.connected:
            return True
        lost_at = self._lost_at
        return lost_at is not None and time.monotonic() - lost_at < self._config.submit_timeout_s

    @property
    def connected(self) -> bool:
        """Whether a scheduler answers now."""
        return self._scheduler.connected

    @property
    def fleet_ready(self) -> bool:
        """Whether the scheduler has reported that its fleet takes requests."""
        return self._parking.fleet_ready

    @property
    def requests(self) -> list[ProxyRequest]:
        """The open requests, in the order in which they came or were last migrated."""
        return list(self._live.values())

    def of_response(self, response_id: str) -> list[ProxyRequest]:
        """The open requests of a response, a request per prompt."""
        several = response_id + "-"
        found = dict.fromkeys(one.whole for one in self._live.values())
        return [o for o in found if o.request_id == response_id or o.request_id.startswith(several)]

    @property
    def inflight(self) -> int:
        return len(self._live)

    @property
    def streaming(self) -> int:
        """The open requests that have a token."""
        return sum(one.has_begun for one in self._live.values())

    @property
    def parked(self) -> int:
        return len(self._parking)

    def check_integrity(self) -> None:
        """Raises IntegrityError if an idle gateway still holds requests."""
        if self._live:
            raise IntegrityError(f"requests still in flight: {', '.join(sorted(self._live))}")
        if self._parking:
            raise IntegrityError(f"{len(self._parking)} requests still parked")

    # -- requests in

    def admit(self, requests: int) -> None:
        """Raises ApiError (503 or 429) when the gateway can't take `requests` more now."""
        if self.draining:
            raise unavailable(_SHUTTING_DOWN)
        if not self._has_scheduler:
            raise unavailable("The server is not connected to its scheduler.")
        if len(self._live) + requests > self._config.max_inflight:
            raise overloaded(
                f"The server has {len(self._live)} requests open; its limit is "
                f"{self._config.max_inflight}."
            )
        if not self.fleet_ready and self._parking.is_open(time.monotonic()):
            self._parking.check_room(requests)

    async def submit(self, request: ProxyRequest) -> None:
        """Records a request in the store and hands it to the scheduler, or parks it.

        Raises ApiError (503, 429, 409). After an error the caller calls `leave`, or submits a
        migrated request again.
        """
        spec = request.spec
        if request.has_ended:  # its client left while an earlier prompt was submitted
            return
        if self._live.setdefault(spec.request_id, request) is not request:
            request.stage = Stage.ENDED  # `leave` must not touch the other request
            raise id_taken()
        if not request.recorded:
            request.encoded_spec = request.encoded_spec or encode_spec(spec)
            recorded = request.stored.setdefault(spec.request_id, request.encoded_spec)
            request.recorded = await self._records.create(
                spec.request_id, recorded, request.prompt_ids, kept=request.kept
            )
            if not request.recorded:
                del request.stored[spec.request_id]
                raise id_taken()
        if spec.resumed_tokens:
            emitted = request.prompt_ids[-spec.resumed_tokens :]
            await self._records.begin_journal(spec.request_id, emitted)
        if request.on_recorded is not None and request.moves:
            await request.on_recorded()
        if request.has_ended:
            # The client left meanwhile.
            self._records.delete(request.stored)
            return
        if not request.moves:
            if not self._has_scheduler:
                self.admit(0)
            request.started_at = time.monotonic()
        self._offer(request)

    def _offer(self, request: ProxyRequest) -> None:
        """Sends a recorded request to the scheduler, or parks it. Raises ApiError (429)."""
        now = time.monotonic()
        there_is_a_fleet = self._has_scheduler and self.fleet_ready
        if there_is_a_fleet or not self._parking.takes(request, now):
            request.submit(now)
            self._scheduler.submit(request.encoded_spec)
        else:
            self._parking.add(request, now)

    def _unpark(self) -> None:
        if self._scheduler.connected and self.fleet_ready:
            for request in self._parking.take_all():
                self._offer(request)

    def leave(self, request: ProxyRequest, reason: str) -> None:
        """Ends a request whose client left; does nothing to a request that has ended."""
        if request.has_ended:
            return
        self._metrics.cancelled(reason)
        for one in request.parts or (request,):
            if not one.has_ended:
                self._forget(one)
                if one.recorded:
                    self._scheduler.cancel(one.spec.request_id, reason)
                self._records.delete(one.stored)
        request.stage = Stage.ENDED
        request.drop_prompt()

    def abandon(self, request: ProxyRequest) -> None:
        """Ends a request here alone: another replica continues it, from its records."""
        if not request.has_ended:
            self._forget(request)
            self._scheduler.cancel(request.spec.request_id, "its stream is continued elsewhere")

    def adopt(self, request: ProxyRequest, incarnation: str) -> None:
        """Continues a request with an `adoption`, which another replica has submitted as
        `incarnation`.
        """
        self._migration.adopt(request, incarnation)

    # -- messages of the scheduler

    def on_queued(self, queued: Queued) -> None:
        if (request := self._live.get(queued.request_id)) is not None:
            request.begun_again |= request.confirmed or request.was_reopened
            request.queue()
        else:
            self._scheduler.cancel(queued.request_id, _ENDED)

    def on_placed(self, placed: Placed) -> None:
        if (request := self._live.get(placed.request_id)) is None:
            if placed.request_id in self._unheard:
                self._unheard.remove(placed.request_id)
            else:
                self._scheduler.cancel(placed.request_id, _ENDED)
            return
        decode = placed.decode.incarnation
        again, request.confirmed = request.confirmed, True
        request.begun_again |= again or request.was_reopened
        if request.stage is Stage.STREAMING:
            if again or request.decode != decode:  # its first token would come twice
                self._migration.lose(request, ApiError(500, LOST))
            else:
                before_s = request.submitted_at - request.arrived_at
                request.predict(before_s + placed.predicted_ttft_s)
            return
        self._tokens.open(placed.decode)
        request.place(decode, placed.predicted_ttft_s, time.monotonic())
        if request.is_too_late:
            objective_s = request.slo.ttft_s or 0.0
            late = would_be_late(request.predicted_ttft_s, objective_s)
            self._fail(request, late, cancel=True)
            return
        if kept := request.take_kept(decode):
            self.intake.on_batch(decode, kept)

    def on_refused(self, refused: Refuse) -> None:
        if (request := self._live.get(refused.request_id)) is None:
            return
        error, now = refusal(refused), time.monotonic()
        may_wait = self._parking.takes_refused(request, refused.code, now)
        if request.stage is Stage.STREAMING or (may_wait and request.was_reopened):
            # An instance that the scheduler has not heard of yet may go on with this incarnation.
            self._migration.move(request, error, "lost")
            return
        if may_wait:
            try:
                self._parking.add(request, now)
                return
            except ApiError as full:
                error = full
        self._fail(request, error, cancel=False)

    def on_failed(self, failed: Fail) -> None:
        request = self._live.get(failed.request_id)
        if request is not None:
            error = failure(failed)
            if failed.prompt_unread:
                self._migration.rewrite(request, error)
            elif failed.resumable:
                self._migration.lose(request, error)
            else:
                self._fail(request, error, cancel=False)

    def on_suspect(self, suspect: Suspect) -> None:
        if (request := self._live.get(suspect.request_id)) is not None:
            request.suspect(suspect.deaths)

    def on_fleet(self, fleet: Fleet) -> None:
        self._parking.note_fleet(time.monotonic(), ready=fleet.ready)
        self._lost_at = None
        self._tokens.keep(fleet.decode, on_demand=fleet.prefill)
        self._load.repeat()
        self._unpark()

    def on_scheduler_lost(self) -> None:
        """Lets all requests wait for the next scheduler. Instances go on with their work."""
        self._lost_at = time.monotonic()
        self._unheard.clear()
        for request in self._live.values():
            if request.at_scheduler:
                request.await_scheduler(self._lost_at)

    def open_requests(self) -> list[OpenRequest]:
        """Lists what the next scheduler is to go on with, oldest first."""
        now = time.monotonic()
        return [one.reopened(now) for one in self._live.values() if one.at_scheduler]

    # -- endings

    def _finish(self, request: ProxyRequest) -> None:
        request_id = request.spec.request_id
        del self._live[request_id]
        if not (request.confirmed or request.was_reopened):
            self._unheard.add(request_id)
        if request.stopped_by_proxy or request.begun_again:
            self._scheduler.cancel(request_id, "stop")
        if request.whole.has_ended:
            self._metrics.finished(request.whole)
            request.whole.drop_prompt()
        self._records.finish(request_id, "finished")
        request.drop_prompt()

    def _fail(self, request: ProxyRequest, error: ApiError, *, cancel: bool) -> None:
        self._forget(request)
        if request.recorded and cancel:
            self._scheduler.cancel(request.spec.request_id, "failed at the proxy")
        if error.is_refusal and not request.has_begun:
            self._records.delete(request.stored)
        elif request.recorded:
            self._records.finish(request.spec.request_id, "failed")
        request.sink.on_error(error)

    def _forget(self, request: ProxyRequest) -> None:
        request.stage = Stage.ENDED
        if self._live.get(request.spec.request_id) is request:  # else its id was taken
            del self._live[request.spec.request_id]
        self._parking.discard(request)
        request.drop_prompt()

    # -- time

    async def _renew(self) -> None:
        """Keeps the records of open requests: what a dead proxy has left expires."""
        while True:
            await asyncio.sleep(RENEW_S)
            live = self._live.items()
            self._records.renew([name for name, one in live if one.recorded and not one.kept])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(WATCH_INTERVAL_S, self._config.submit_timeout_s / 2))
            now = time.monotonic()
            for request in list(self._live.values()):
                self._check_wait(request, now)
            self._unpark()
            in_use = {one.decode for one in self._live.values() if one.decode is not None}
            self._tokens.prune(in_use)

    def _check_wait(self, request: ProxyRequest, now: float) -> None:
        waited = now - request.waiting_since
        limit = self._config.submit_timeout_s
        if request.at_scheduler and self._is_given_up(request, now):
            self._fail(request, unavailable(_NO_SCHEDULER), cancel=False)
        elif request.stage is Stage.SUBMITTED and waited > limit:
            error = unavailable(f"The scheduler did not answer within {limit:g} s.")
            if request.has_begun or request.adoption is not None:  # its client has a 200
                self._migration.move(request, error, "lost")
            else:
                self._fail(request, error, cancel=True)
        elif request.stage is Stage.UNPLACED and waited > limit:
            self._migration.lose(request, ApiError(500, BROKEN, code="failed"))
        elif (expired := self._parking.expiry(request, now)) is not None:
            self._fail(request, expired, cancel=False)

    def _is_given_up(self, request: ProxyRequest, now: float) -> bool:
        """Whether the request has waited too long for a scheduler: until its own deadline, if its
        client has tokens or it was admitted before.
        """
        if self._lost_at is None:
            return False
        if request.has_begun or request.moves:
            return now - request.arrived_at > self._request_timeout_s
        return now - self._lost_at > self._config.submit_timeout_s
