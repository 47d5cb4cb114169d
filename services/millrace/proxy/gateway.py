"""All requests in flight: where verdicts of the scheduler and tokens find their request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from millrace.core.config import ProxyConfig
from millrace.core.errors import IntegrityError, MillraceError
from millrace.proxy.builder import Submission
from millrace.proxy.codec import Life, life_of
from millrace.proxy.errors import ApiError
from millrace.proxy.generation import Generation, Stage
from millrace.proxy.metrics import ProxyMetrics
from millrace.proxy.scheduler_link import SchedulerLink
from millrace.proxy.token_links import TokenLinks
from millrace.state.store import RequestStore
from millrace.wire.pb import decode_pb2, scheduler_pb2

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
#: Endings are written to the store this late, many in one round trip.
ENDINGS_INTERVAL_S = 0.02
#: A request that streams while the scheduler is away may be silent for this long.
ORPHAN_SILENCE_S = 30.0
_RETRY_AFTER_S = 1.0

_REFUSALS = {"overloaded": 429, "unavailable": 503, "too_large": 400, "invalid": 400}


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
        self._store = store
        self._config = config
        self._metrics = metrics
        self._live: dict[str, Generation] = {}
        self._scheduler = SchedulerLink(scheduler, life, self)
        self._tokens = TokenLinks(life, self)
        self._fleet_ready = False
        self._tasks: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._endings: list[tuple[str, str]] = []
        #: Set when the process is told to stop: nothing new is taken.
        self.draining = False

    # -- life of the gateway

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._scheduler.run()),
            asyncio.create_task(self._watch()),
        ]

    async def close(self) -> None:
        """Cancels what is left, tells the scheduler and lets go of every stream."""
        for generation in list(self._live.values()):
            self._fail(generation, ApiError(503, "The server is shutting down."), cancel=True)
        await self._scheduler.flushed(2.0)
        self._write_endings()
        if self._background:
            await asyncio.wait(self._background, timeout=2.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._tokens.close()

    @property
    def ready(self) -> bool:
        """Whether a request would find a fleet that works."""
        return self._scheduler.connected and self._fleet_ready and not self.draining

    @property
    def inflight(self) -> int:
        return len(self._live)

    def check_integrity(self) -> None:
        """Raises IntegrityError if an idle gateway still holds requests or unwritten endings."""
        if self._live:
            raise IntegrityError(f"requests still in flight: {', '.join(sorted(self._live))}")

    # -- requests in

    def admit(self, requests: int) -> None:
        """Raises ApiError (503 or 429) when `requests` more can't be taken now."""
        if self.draining or not self._scheduler.connected:
            what = "shutting down" if self.draining else "not connected to its scheduler"
            raise ApiError(
                503, f"The server is {what}.", code="unavailable", retry_after_s=_RETRY_AFTER_S
            )
        if len(self._live) + requests > self._config.max_inflight:
            raise ApiError(
                429,
                f"The server has {len(self._live)} requests open; its limit is "
                f"{self._config.max_inflight}.",
                code="overloaded",
                retry_after_s=_RETRY_AFTER_S,
            )

    async def submit(self, submission: Submission) -> None:
        """Records a request in the store and hands it to the scheduler. Raises ApiError (503)."""
        generation, spec = submission.generation, submission.spec
        request_id = generation.request_id
        self._live[request_id] = generation
        try:
            await self._store.create(
                request_id, spec=spec.SerializeToString(), prompt_ids=submission.prompt_ids
            )
        except MillraceError as error:
            self._live.pop(request_id, None)
            log.warning("request %s: %s", request_id, error)
            raise ApiError(
                503,
                "The request store does not answer.",
                code="unavailable",
                retry_after_s=_RETRY_AFTER_S,
            ) from error
        if generation.stage is Stage.ENDED:
            self._spawn(self._store.delete(request_id))  # the client left meanwhile
            return
        if not self._scheduler.connected:
            self.admit(0)
        generation.started_at = generation.waiting_since = time.monotonic()
        self._scheduler.submit(spec)

    def leave(self, generation: Generation, reason: str) -> None:
        """The client wants no more of a request; harmless when it has ended."""
        if generation.stage is not Stage.ENDED:
            generation.stage = Stage.ENDED
            self._metrics.cancelled.labels(reason).inc()
            self._scheduler.cancel(generation.request_id, reason)
            self._live.pop(generation.request_id, None)
            self._spawn(self._store.delete(generation.request_id))

    # -- what the scheduler says

    def on_placed(self, placed: scheduler_pb2.Placed) -> None:
        generation = self._live.get(placed.request_id)
        if generation is None:
            return
        decode = life_of(placed.decode)
        again, generation.confirmed = generation.confirmed, True
        if generation.stage is Stage.STREAMING:
            generation.predicted_ttft_s = placed.predicted_ttft_s
            if again or generation.decode != decode:  # token one would come twice
                self._fail(
                    generation,
                    ApiError(500, "The instance that generated this answer was lost."),
                    cancel=True,
                )
            return
        self._tokens.open(decode, placed.decode_address)
        generation.place(decode, placed.predicted_ttft_s, time.monotonic())
        if kept := generation.take_kept(decode):
            self.on_batch(decode, kept)

    def on_refused(self, refused: scheduler_pb2.Refused) -> None:
        generation = self._live.get(refused.request_id)
        if generation is not None:
            status = _REFUSALS.get(refused.code, 503)
            retry_after_s = None if status == 400 else refused.retry_after_s or _RETRY_AFTER_S
            error = ApiError(
                status, refused.message, code=refused.code, retry_after_s=retry_after_s
            )
            self._fail(generation, error, cancel=False)

    def on_failed(self, failed: scheduler_pb2.Failed) -> None:
        generation = self._live.get(failed.request_id)
        if generation is not None:
            error = ApiError(500, failed.message or "The request failed.", code="failed")
            self._fail(generation, error, cancel=False)

    def on_fleet(self, fleet: scheduler_pb2.Fleet) -> None:
        self._fleet_ready = fleet.ready
        self._tokens.keep(fleet.decode)

    def on_scheduler_lost(self) -> None:
        """What has no tokens yet is lost with the scheduler; what streams may go on."""
        for generation in list(self._live.values()):
            if generation.stage is not Stage.STREAMING:
                error = ApiError(
                    503,
                    "The connection to the scheduler was lost.",
                    code="unavailable",
                    retry_after_s=_RETRY_AFTER_S,
                )
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
            if event.finish_reason in ("error", "cancelled"):
                message = event.error or "The request was cancelled by the server."
                self._fail(generation, ApiError(500, message, code="failed"), cancel=True)
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
            if generation.stage is Stage.ENDED:
                self._finish(generation)
        self._metrics.tokens.inc(tokens)

    def on_tokens_lost(self, decode: Life) -> None:
        for generation in list(self._live.values()):
            if generation.has_kept(decode) or (
                generation.decode == decode and generation.stage is Stage.STREAMING
            ):
                error = ApiError(500, "The stream of generated tokens broke.", code="failed")
                self._fail(generation, error, cancel=True)
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

    # -- endings

    def _finish(self, generation: Generation) -> None:
        del self._live[generation.request_id]
        if generation.stopped_by_proxy:
            self._scheduler.cancel(generation.request_id, "stop")
        self._metrics.finished(generation)
        self._end_later(generation.request_id, "finished")

    def _fail(self, generation: Generation, error: ApiError, *, cancel: bool) -> None:
        self._live.pop(generation.request_id, None)
        generation.stage = Stage.ENDED
        if cancel:
            self._scheduler.cancel(generation.request_id, "failed at the proxy")
        self._end_later(generation.request_id, "failed")
        generation.sink.on_error(error)

    def _end_later(self, request_id: str, state: str) -> None:
        if not self._endings:
            asyncio.get_running_loop().call_later(ENDINGS_INTERVAL_S, self._write_endings)
        self._endings.append((request_id, state))

    def _write_endings(self) -> None:
        endings, self._endings = self._endings, []
        for request_id, state in endings:
            self._spawn(self._store.finish(request_id, state))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_logged(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- time

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(WATCH_INTERVAL_S, self._config.submit_timeout_s / 2))
            now = time.monotonic()
            for generation in list(self._live.values()):
                self._check_wait(generation, now)
            self._tokens.prune({g.decode for g in self._live.values() if g.decode is not None})

    def _check_wait(self, generation: Generation, now: float) -> None:
        waited = now - generation.waiting_since
        limit = self._config.submit_timeout_s
        if generation.stage is Stage.SUBMITTED and waited > limit:
            error = ApiError(
                503,
                f"The scheduler did not answer within {limit:g} s.",
                code="unavailable",
                retry_after_s=_RETRY_AFTER_S,
            )
            self._fail(generation, error, cancel=True)
        elif generation.stage is Stage.UNPLACED and waited > limit:
            error = ApiError(500, "The stream of generated tokens broke.", code="failed")
            self._fail(generation, error, cancel=True)
        elif (
            generation.stage is Stage.STREAMING
            and not self._scheduler.connected
            and now - generation.last_token_at > ORPHAN_SILENCE_S
        ):
            error = ApiError(500, "The connection to the scheduler was lost.", code="failed")
            self._fail(generation, error, cancel=False)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    """The store's clean-up never fails a request: records expire by themselves."""
    try:
        await work
    except MillraceError as error:
        log.warning("request store: %s", error)
