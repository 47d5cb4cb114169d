"""All requests in flight: where verdicts of the scheduler and tokens find their request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from millrace.core.config import ProxyConfig
from millrace.core.errors import IntegrityError
from millrace.proxy.codec import Life, life_of, refusal
from millrace.proxy.errors import ApiError, overloaded, unavailable
from millrace.proxy.fleet.parking import LoadReport, Parking
from millrace.proxy.fleet.prompts_ahead import PromptsAhead
from millrace.proxy.fleet.records import Records
from millrace.proxy.fleet.scheduler_link import SchedulerLink
from millrace.proxy.fleet.token_links import TokenLinks
from millrace.proxy.generation.generation import Generation, Stage
from millrace.proxy.metrics import ProxyMetrics
from millrace.state.store import RequestStore
from millrace.wire.moves import PREEMPTED
from millrace.wire.pb import decode_pb2, scheduler_pb2

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
#: A request that streams while the scheduler is away may be silent for this long.
ORPHAN_SILENCE_S = 30.0
#: A request goes on elsewhere after so many lost instances: if it loses more, then it is likelier
#: to be what ends them.
MOST_LOSSES = 3
#: And so often in all: where it finds a place while a pool is replaced, it may have to leave again.
#: But for want of memory as often as may be: each life brings a token at least.
MOST_MOVES = 16

_LOST = "The instance that generated this answer was lost."
_BROKEN = "The stream of generated tokens broke."
_NO_SCHEDULER = "The connection to the scheduler was lost."
_SHUTTING_DOWN = "The server is shutting down."


class Gateway:
    """Owns every `Generation` from `submit` to its end. Used from the event loop only."""

    def __init__(
        self,
        *,
        life: Life,
        scheduler: str,
        store: RequestStore,
        config: ProxyConfig,
        metrics: ProxyMetrics,
    ) -> None:
        self.life = life
        self._records = Records(store)
        self._config = config
        self._metrics = metrics
        self._live: dict[str, Generation] = {}  # by the id that the services know
        self._scheduler = SchedulerLink(scheduler, life, self)
        self._tokens = TokenLinks(life, self)
        self.prompts = PromptsAhead(self._scheduler.ask_progress)
        self.on_progress = self.prompts.hear
        self._load = LoadReport(self._scheduler.report)
        self._parking = Parking(config, self._load.set)
        self._fleet_ready = False
        self._tasks: list[asyncio.Task[None]] = []
        #: Set when the process is told to stop: nothing new is taken.
        self.draining = False

    # -- life of the gateway

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._scheduler.run()),
            asyncio.create_task(self._watch()),
        ]

    def drain(self) -> None:
        """Takes nothing new, and ends what no instance has begun."""
        self.draining = True
        for generation in self._parking.shut():
            self._fail(generation, unavailable(_SHUTTING_DOWN), cancel=False)

    async def close(self) -> None:
        """Cancels what is left, tells the scheduler and lets go of every stream."""
        self.drain()
        for generation in list(self._live.values()):
            self._fail(generation, unavailable(_SHUTTING_DOWN), cancel=True)
        await self._scheduler.flushed(2.0)
        self._load.close()
        await self._records.close(2.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._tokens.close()

    @property
    def ready(self) -> bool:
        """Whether a request would find a fleet that works, or may wait here for one.

        What wakes a fleet at zero are the requests that wait: they must still be sent here.
        """
        takes = self._fleet_ready or self._parking.is_open
        return self._scheduler.connected and takes and not self.draining

    @property
    def fleet_ready(self) -> bool:
        """Whether the scheduler has said that its fleet takes requests."""
        return self._fleet_ready

    @property
    def generations(self) -> list[Generation]:
        """Of the requests that are open, in the order in which they came or were continued."""
        return list(self._live.values())

    @property
    def inflight(self) -> int:
        return len(self._live)

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
        """Raises ApiError (503 or 429) when `requests` more can't be taken now."""
        if self.draining:
            raise unavailable(_SHUTTING_DOWN)
        if not self._scheduler.connected:
            raise unavailable("The server is not connected to its scheduler.")
        if len(self._live) + requests > self._config.max_inflight:
            raise overloaded(
                f"The server has {len(self._live)} requests open; its limit is "
                f"{self._config.max_inflight}."
            )
        if self._parking.is_open and not self._fleet_ready:
            self._parking.check_room(requests)

    async def submit(self, generation: Generation) -> None:
        """Records a request in the store and hands it to the scheduler, or parks it.

        Raises ApiError (503, 429). The request is the caller's to `leave` then.
        """
        self._live[generation.spec.request_id] = generation
        await self._records.create(generation.spec, generation.prompt_ids)
        if generation.has_ended:
            self._records.delete(generation.spec.request_id)  # the client left meanwhile
            return
        if not generation.moves:
            if not self._scheduler.connected:
                self.admit(0)
            generation.started_at = time.monotonic()
        self._offer(generation)

    def _offer(self, generation: Generation) -> None:
        """A recorded request goes to the scheduler, or waits. Raises ApiError (429)."""
        now = time.monotonic()
        there_is_a_fleet = self._scheduler.connected and self._fleet_ready
        if there_is_a_fleet or not self._parking.takes(generation):
            generation.submit(now)
            self._scheduler.submit(generation.spec)
        else:
            self._parking.add(generation, now)

    def _unpark(self) -> None:
        if self._scheduler.connected and self._fleet_ready:
            for generation in self._parking.take_all():
                self._offer(generation)

    def leave(self, generation: Generation, reason: str) -> None:
        """The client wants no more of a request; harmless when it has ended."""
        if not generation.has_ended:
            self._metrics.cancelled.labels(reason).inc()
            self._forget(generation)
            self._scheduler.cancel(generation.spec.request_id, reason)
            self._records.delete(generation.spec.request_id)

    # -- what the scheduler says

    def on_queued(self, queued: scheduler_pb2.Queued) -> None:
        if (generation := self._live.get(queued.request_id)) is not None:
            generation.queue()

    def on_placed(self, placed: scheduler_pb2.Placed) -> None:
        generation = self._live.get(placed.request_id)
        if generation is None:
            return
        decode = life_of(placed.decode)
        again, generation.confirmed = generation.confirmed, True
        if generation.stage is Stage.STREAMING:
            if again or generation.decode != decode:  # token one would come twice
                self._lose(generation, ApiError(500, _LOST))
            else:
                before_s = generation.submitted_at - generation.arrived_at
                generation.predict(before_s + placed.predicted_ttft_s)
            return
        self._tokens.open(decode, placed.decode_address)
        generation.place(decode, placed.predicted_ttft_s, time.monotonic())
        if kept := generation.take_kept(decode):
            self.on_batch(decode, kept)

    def on_refused(self, refused: scheduler_pb2.Refused) -> None:
        generation = self._live.get(refused.request_id)
        if generation is None:
            return
        error = refusal(refused)
        if self._parking.takes_refused(generation, refused.code):
            try:
                self._parking.add(generation, time.monotonic())
                return
            except ApiError as full:
                error = full
        self._fail(generation, error, cancel=False)

    def on_failed(self, failed: scheduler_pb2.Failed) -> None:
        generation = self._live.get(failed.request_id)
        if generation is not None:
            error = ApiError(500, failed.message or "The request failed.", code="failed")
            if failed.resumable:
                self._lose(generation, error)
            else:
                self._fail(generation, error, cancel=False)

    def on_fleet(self, fleet: scheduler_pb2.Fleet) -> None:
        self._fleet_ready = fleet.ready
        self._tokens.keep(fleet.decode)
        for generation in [g for g in self._live.values() if g.orphaned]:
            self._move(generation, ApiError(500, _NO_SCHEDULER, code="failed"), "scheduler")
        self._load.repeat()
        self._unpark()

    def on_scheduler_lost(self) -> None:
        """What has no tokens yet is lost with the scheduler, but for what waits here. What streams
        may end before a scheduler is back, and goes on elsewhere if not."""
        self._fleet_ready = False
        for generation in list(self._live.values()):
            error = unavailable(_NO_SCHEDULER)
            match generation.stage:
                case Stage.STREAMING:
                    generation.orphaned = True
                case Stage.PARKED | Stage.MOVING:
                    pass
                case _ if generation.moves:
                    self._move(generation, error, "scheduler")
                case _:
                    self._fail(generation, error, cancel=False)

    # -- what decode says

    def on_batch(self, decode: Life, events: Iterable[decode_pb2.TokenEvent]) -> None:
        now = time.monotonic()
        live, tbt = self._live, self._metrics.tbt
        tokens = 0
        for event in events:
            generation = live.get(event.request_id)
            if generation is None:
                continue
            if not self._comes_from(generation, decode):
                if generation.stage is not Stage.STREAMING and generation.decode != decode:
                    generation.keep(decode, event)  # it may have been placed there meanwhile
                continue
            if event.finish_reason in ("error", "cancelled", "moved"):
                self._broken_off(generation, event)
                continue
            tokens += len(event.token_ids)
            try:
                gap = generation.take(event, now)
            except Exception:  # a defect met in one request must not end the stream of all
                log.exception("request %s: tokens could not be taken", event.request_id)
                self._fail(generation, ApiError(500, "Internal error."), cancel=True)
                continue
            if gap is not None:
                tbt.observe(gap)
            if generation.has_ended:
                self._finish(generation)
        self._metrics.tokens.inc(tokens)

    def _broken_off(self, generation: Generation, event: decode_pb2.TokenEvent) -> None:
        """An instance says that it will not finish the answer."""
        if event.finish_reason == "moved":
            generation.note(event)
            preempted = event.error == PREEMPTED
            generation.preemptions += preempted
            reason = PREEMPTED if preempted else "moved"
            self._move(generation, ApiError(500, _LOST, code="failed"), reason)
        else:
            message = event.error or "The request was cancelled by the server."
            self._fail(generation, ApiError(500, message, code="failed"), cancel=True)

    def on_tokens_lost(self, decode: Life) -> None:
        for generation in list(self._live.values()):
            if generation.has_kept(decode) or (
                generation.decode == decode and generation.stage is Stage.STREAMING
            ):
                self._lose(generation, ApiError(500, _BROKEN, code="failed"))
            elif generation.decode == decode and generation.stage is Stage.PLACED:
                # The scheduler places it again if the instance died; else its tokens are lost.
                generation.stage = Stage.UNPLACED
                generation.waiting_since = time.monotonic()

    def _comes_from(self, generation: Generation, decode: Life) -> bool:
        """Whether events of this instance count for the request."""
        if generation.decode == decode:
            return generation.stage is not Stage.UNPLACED
        if generation.decode is None:  # its Placed is still on the way
            generation.place(decode, 0.0, time.monotonic())
            return True
        return False

    # -- going on elsewhere

    def _lose(self, generation: Generation, error: ApiError) -> None:
        """The request's instance is gone, or its tokens are: has the rest generated elsewhere."""
        generation.losses += 1
        if generation.losses > MOST_LOSSES:
            self._fail(generation, error, cancel=True)
        else:
            self._move(generation, error, "lost")

    def _move(self, generation: Generation, error: ApiError, reason: str) -> None:
        """Has what is left generated elsewhere; ends with `error` what can't be."""
        before = generation.spec.request_id
        moves = generation.moves - generation.preemptions
        if not generation.may_move or moves >= MOST_MOVES:
            self._fail(generation, error, cancel=True)
            return
        self._scheduler.cancel(before, "it goes on elsewhere")
        del self._live[before]
        self._records.finish(before, "cancelled")
        generation.move(time.monotonic())
        self._live[generation.spec.request_id] = generation
        self._metrics.moved.labels(reason).inc()
        log.info(
            "request %s goes on as %s behind %d tokens: %s",
            before,
            generation.spec.request_id,
            generation.spec.resumed_tokens,
            error.message,
        )
        self._records.spawn(self._go_on(generation))

    async def _go_on(self, generation: Generation) -> None:
        """Submits a request's next life."""
        if generation.has_ended:
            return  # the client left meanwhile
        try:
            await self.submit(generation)
        except ApiError as error:
            if not generation.has_ended:
                self._fail(generation, error, cancel=False)

    # -- endings

    def _finish(self, generation: Generation) -> None:
        request_id = generation.spec.request_id
        del self._live[request_id]
        if generation.stopped_by_proxy:
            self._scheduler.cancel(request_id, "stop")
        self._metrics.finished(generation)
        self._records.finish(request_id, "finished")

    def _fail(self, generation: Generation, error: ApiError, *, cancel: bool) -> None:
        self._forget(generation)
        if cancel:
            self._scheduler.cancel(generation.spec.request_id, "failed at the proxy")
        self._records.finish(generation.spec.request_id, "failed")
        generation.sink.on_error(error)

    def _forget(self, generation: Generation) -> None:
        generation.stage = Stage.ENDED
        self._live.pop(generation.spec.request_id, None)
        self._parking.discard(generation)

    # -- time

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(WATCH_INTERVAL_S, self._config.submit_timeout_s / 2))
            now = time.monotonic()
            for generation in list(self._live.values()):
                self._check_wait(generation, now)
            self._unpark()
            self._tokens.prune({g.decode for g in self._live.values() if g.decode is not None})

    def _check_wait(self, generation: Generation, now: float) -> None:
        waited = now - generation.waiting_since
        limit = self._config.submit_timeout_s
        if generation.stage is Stage.SUBMITTED and waited > limit:
            error = unavailable(f"The scheduler did not answer within {limit:g} s.")
            self._fail(generation, error, cancel=True)
        elif generation.stage is Stage.UNPLACED and waited > limit:
            self._lose(generation, ApiError(500, _BROKEN, code="failed"))
        elif (expired := self._parking.expiry(generation, now)) is not None:
            self._fail(generation, expired, cancel=False)
        elif (
            generation.stage is Stage.STREAMING
            and not self._scheduler.connected
            and now - generation.last_token_at > ORPHAN_SILENCE_S
        ):
            error = ApiError(500, _NO_SCHEDULER, code="failed")
            self._fail(generation, error, cancel=False)
