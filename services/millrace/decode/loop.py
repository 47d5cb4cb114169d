"""The decode instance: admit, receive, join, step, emit, release.

The event loop owns every request and all pages; the compute thread only runs the batch's step.
Changes to the batch wait for the moment between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor

import grpc

from millrace.core.decode_placement import pages_needed
from millrace.core.errors import CapacityError, MillraceError, TransferError
from millrace.decode.journal import Journal
from millrace.decode.kv_servicer import KvReceiverServicer
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.pace import TokenPace
from millrace.decode.request import DecodeRequest
from millrace.decode.servicer import DecodeServicer
from millrace.decode.token_events import first_token_events, step_event
from millrace.decode.token_streams import Life, TokenStreams, life_of
from millrace.engine.decode_batch import DecodeBatch, TokenOut
from millrace.engine.sampler import Sampler
from millrace.engine.sampling_spec import finish_reason
from millrace.transfer.control import ReceiveCallbacks
from millrace.transfer.receive_manager import ReceiveManager
from millrace.wire.pb import decode_pb2, scheduler_pb2, transfer_pb2
from millrace.worker.codec import span
from millrace.worker.host import WorkerContext
from millrace.worker.link import request_failed, request_released
from millrace.worker.tasks import Tasks

log = logging.getLogger(__name__)

#: Failures that an answer need not meet at another instance.
_OF_THIS_PLACE = frozenset({"store", "transfer"})


class DecodeRole:
    """Everything an instance holds for its requests is in `_requests`."""

    name = "decode"

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._id = context.incarnation.id
        self._pool = context.engine.pool
        self._runner = context.engine.runner
        self._page_tokens = context.engine.layout.page_tokens
        self._max_batch = context.config.engine.max_batch
        self._requests: dict[str, DecodeRequest] = {}
        self._joining: deque[DecodeRequest] = deque()
        self._leaving: list[DecodeRequest] = []
        self._wake = asyncio.Event()
        self._emptied = asyncio.Event()
        self._tasks = Tasks()
        self._metrics = DecodeMetrics(context.registry)
        self._pace = TokenPace()
        self._streams = TokenStreams(context.config.scheduler.lease_s, self._proxy_gone)
        self._journal = Journal(context.store, context.config.store.journal_interval_ms / 1e3)
        self._batch = DecodeBatch(self._runner, self._pool, Sampler(), max_batch=self._max_batch)
        self._receiver = ReceiveManager(
            transport=context.transport,
            layout=context.engine.layout,
            storage=context.engine.storage,
            identity=(context.incarnation.id, context.incarnation.generation),
            config=context.config.transfer,
            callbacks=ReceiveCallbacks(
                on_first_tokens=self._first_tokens,
                on_landed=self._landed,
                on_prefix=self._prefix_landed,
                on_failed=self._receive_failed,
            ),
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode-compute")

    @property
    def kv_region(self) -> int:
        return self._receiver.region

    def attach(self, server: grpc.aio.Server) -> None:
        KvReceiverServicer(self._receiver).add_to(server)
        DecodeServicer(self._streams, life_of(self._context.incarnation)).add_to(server)

    def fill_register(self, register: scheduler_pb2.Register) -> None:
        register.role = self.name
        register.max_batch = self._max_batch

    def counts(self) -> tuple[int, int]:
        running = sum(r.joined for r in self._requests.values())
        return running, len(self._requests) - running

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        (running, waiting), tbt_s = self.counts(), self._pace.take_s()
        return scheduler_pb2.Heartbeat(
            free_pages=self._pool.free_pages, running=running, waiting=waiting, tbt_s=tbt_s
        )

    async def wait_idle(self) -> None:
        while self._requests:
            self._emptied.clear()
            await self._emptied.wait()

    def on_command(self, command: scheduler_pb2.WorkerCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "admit_decode":
            self._admit_attempt(command.admit_decode)
        elif kind == "cancel" and (request := self._requests.get(command.cancel.request_id)):
            self._metrics.cancelled.inc(not request.ended)
            self._end(request)
        elif kind == "drain":
            self._evict(abort=command.drain.abort)

    async def run(self) -> None:
        self._tasks.spawn(self._journal.run())
        self._tasks.spawn(self._step_forever())
        await self._tasks.watch()

    async def drop_all(self, reason: str) -> None:
        log.info("dropping %d requests: %s", len(self._requests), reason)
        for request in list(self._requests.values()):
            self._move(request)
        await self.wait_idle()

    def check_integrity(self) -> None:
        self._pool.check_integrity(expected_used=0)
        self._receiver.check_integrity()
        self._batch.check_integrity()

    async def close(self) -> None:
        await self._tasks.cancel()
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        await self._journal.flush()
        await self._receiver.close()

    # -- a request's life

    def _admit_attempt(self, admit: scheduler_pb2.AdmitDecode) -> None:
        """A new request, or another attempt at one whose first tokens were kept."""
        request = self._requests.get(admit.request.request_id)
        if request is not None:
            request.attempt = admit.attempt  # if it has ended, its release answers this too
            if not request.ended:
                self._rewind(request, admit)
        elif admit.kept_tokens:
            message = f"none of the {admit.kept_tokens} tokens that were to be kept are here"
            self._refuse(admit, message, "transfer")
        else:
            self._admit(admit)

    def _rewind(self, request: DecodeRequest, admit: scheduler_pb2.AdmitDecode) -> None:
        try:
            if request.streams:
                raise TransferError(f"request {request.id} has begun to stream")
            self._receiver.rewind(request.id, admit.attempt, admit.kept_tokens)
        except TransferError as error:
            self._fail(request, str(error), "transfer")

    def _refuse(self, admit: scheduler_pb2.AdmitDecode, message: str, reason: str) -> None:
        request_id, attempt = admit.request.request_id, admit.attempt
        self._metrics.failed.labels(reason).inc()
        self._context.send(request_failed(request_id, message, retryable=True, attempt=attempt))
        self._context.send(request_released(request_id, attempt=attempt))

    def _admit(self, admit: scheduler_pb2.AdmitDecode) -> None:
        """Reserves the request's pages, or says at once that there are none."""
        spec, n = admit.request, admit.request.sampling.n
        try:
            if n > self._max_batch:
                raise CapacityError(f"{n} choices wanted, the batch holds {self._max_batch}")
            pages = self._pool.allocate(
                pages_needed(spec.prompt_tokens, spec.sampling.max_tokens, n, self._page_tokens)
            )
        except CapacityError as error:
            self._refuse(admit, str(error), "capacity")
            return
        attempt = admit.attempt or 1
        request = self._requests[spec.request_id] = DecodeRequest.of(spec, pages, attempt)
        prompt_pages = -(-request.prompt_tokens // self._page_tokens)
        self._receiver.admit(request.id, pages[:prompt_pages], request.prompt_tokens, attempt)
        if request.sampling.needs_prompt_ids:
            self._tasks.spawn(self._fetch_prompt(request))

    def _first_tokens(self, request_id: str, message: transfer_pb2.FinishPrefillRequest) -> None:
        request = self._requests.get(request_id)
        if request is None or request.ended:
            return
        request.first_token_ids = [t.token_id for t in message.first_tokens]
        request.first_token_s = request.clock.now_s()
        request.open_choices = set(range(len(message.first_tokens)))
        request.transfer = next((s for s in message.spans if s.name == "kv_transfer"), None)
        for event in first_token_events(request, message):
            self._emit(request, event, finish_reason(request.sampling, 1, event.token_ids[0]))
        self._try_join(request)

    def _landed(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None or request.ended:
            return
        request.landed = True
        now_s = request.clock.now_s()
        if request.transfer is not None:
            request.transfer.end_s = max(now_s, request.transfer.start_s)
            request.spans.append(request.transfer)
        else:
            request.spans.append(span("kv_transfer", self._id, request.admitted_s, now_s))
        self._try_join(request)

    def _prefix_landed(self, request_id: str, attempt: int, tokens: int) -> None:
        request = self._requests.get(request_id)
        if request is None or not request.may_go_on:
            return
        landed = scheduler_pb2.PrefixLanded(request_id=request_id, attempt=attempt, tokens=tokens)
        self._context.send(scheduler_pb2.WorkerMessage(prefix_landed=landed))

    def _receive_failed(
        self, request_id: str, message: str, attempt: int, kept_tokens: int
    ) -> None:
        """With a prefix to go on from the scheduler decides: another attempt, or a cancel."""
        request = self._requests.get(request_id)
        if request is None or request.ended:
            return
        if not kept_tokens or not request.may_go_on:
            self._fail(request, message, "transfer")
            return
        log.warning("request %s: %s; %d tokens are kept", request_id, message, kept_tokens)
        self._metrics.failed.labels("transfer").inc()
        self._context.send(
            request_failed(
                request_id, message, retryable=True, attempt=attempt, kept_tokens=kept_tokens
            )
        )

    async def _fetch_prompt(self, request: DecodeRequest) -> None:
        try:
            request.prompt_ids = await self._context.store.prompt_ids(request.id)
        except MillraceError as error:
            self._fail(request, str(error), "store")
        else:
            self._try_join(request)

    def _try_join(self, request: DecodeRequest) -> None:
        if request.can_join and not request.joined:
            request.joined = True
            self._joining.append(request)
            self._wake.set()

    def _fail(self, request: DecodeRequest, message: str, reason: str) -> None:
        """Tells the scheduler at once. Before token one another attempt may do better; after it the
        answer may go on elsewhere, where the reason is this place's."""
        if request.ended:
            return
        log.warning("request %s: %s", request.id, message)
        self._metrics.failed.labels(reason).inc()
        if request.streams and reason in _OF_THIS_PLACE:
            self._move(request)
            return
        retryable = not request.streams and reason not in ("proxy", "evicted")
        self._context.send(
            request_failed(request.id, message, retryable=retryable, attempt=request.attempt)
        )
        self._end(request)

    def _move(self, request: DecodeRequest) -> None:
        """Ends the request here, to go on elsewhere: its proxy knows the tokens that are out, and
        the scheduler tries again what has none."""
        if request.streams and not request.ended:
            request.finish_reason = "moved"
            event = decode_pb2.TokenEvent(
                request_id=request.id,
                finish_reason="moved",
                stop_token_id=-1,
                spans=request.spans,
            )
            self._streams.publish(request.proxy, event)
        self._end(request)

    def _evict(self, *, abort: bool) -> None:
        """Lets go of every request, to go on elsewhere or to end with an error."""
        log.info("letting go of %d requests, abort %s", len(self._requests), abort)
        for request in list(self._requests.values()):
            if abort:
                self._fail(request, "the instance had to let go of its requests", "evicted")
            else:
                self._move(request)

    def _end(self, request: DecodeRequest) -> None:
        """Takes the request out at the next step boundary and frees what it holds."""
        if not request.ended:
            request.ended = True
            self._leaving.append(request)
            self._wake.set()

    # -- steps, and what happens between two of them

    async def _step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        emitted: Many[TokenOut] = ()
        while True:
            self._apply_changes()
            if self._batch.size:
                step = loop.run_in_executor(self._thread, self._step)
                self._publish(emitted)  # while the next step computes
                emitted = await step
                self._pace.stepped(time.perf_counter())
            else:
                self._pace.paused()
                self._publish(emitted)
                emitted = ()
                await self._wake.wait()
            self._wake.clear()

    def _step(self) -> list[TokenOut]:
        """On the compute thread."""
        begun = time.perf_counter()
        self._metrics.batch.observe(self._batch.size)
        outs = self._batch.step()
        self._metrics.step_s.observe(time.perf_counter() - begun)
        return outs

    def _apply_changes(self) -> None:
        for request in self._leaving:
            self._batch.remove(request.id)
            self._tasks.spawn(self._release(request))
        self._leaving.clear()
        while self._joining:
            request = self._joining[0]
            if not request.ended:
                if self._batch.size + len(request.open_choices) > self._max_batch:
                    break
                self._join(request)
            self._joining.popleft()

    def _join(self, request: DecodeRequest) -> None:
        partial = request.prompt_tokens // self._page_tokens  # index of the last prompt page
        for sequence in request.sequences(self._page_tokens):
            if sequence.choice and request.prompt_tokens % self._page_tokens:
                self._runner.copy_page(request.pages[partial], sequence.pages[partial])
            self._batch.add(sequence)
        request.first_step_s = request.clock.now_s()
        self._metrics.join_s.observe(request.first_step_s - request.first_token_s)
        started = scheduler_pb2.DecodeStarted(request_id=request.id)
        self._context.send(scheduler_pb2.WorkerMessage(decode_started=started))

    async def _release(self, request: DecodeRequest) -> None:
        """Frees the pages once no write can reach them any more."""
        await self._receiver.release(request.id)
        self._pool.free(request.pages)
        del self._requests[request.id]
        if request.finish_reason:
            finished = scheduler_pb2.RequestFinished(
                request_id=request.id,
                reason=request.finish_reason,
                generated_tokens=request.generated_tokens,
            )
            self._context.send(scheduler_pb2.WorkerMessage(request_finished=finished))
        else:
            self._context.send(request_released(request.id, attempt=request.attempt))
        self._emptied.set()

    # -- tokens out

    def _publish(self, outs: Many[TokenOut]) -> None:
        for out in outs:
            request = self._requests.get(out.request_id)
            if request is None or request.ended:
                continue
            if out.error:
                self._fail(request, out.error, "logits")
                continue
            request.stepped(self._id, self._batch.size)
            self._emit(request, step_event(out), out.finish_reason)

    def _emit(self, request: DecodeRequest, event: decode_pb2.TokenEvent, reason: str) -> None:
        request.generated_tokens += len(event.token_ids)
        self._metrics.tokens.inc(len(event.token_ids))
        if reason:
            event.finish_reason = reason
            if reason == "stop":
                event.stop_token_id = event.token_ids[-1]
            request.open_choices.discard(event.choice)
            if not request.open_choices:
                event.spans.extend(request.spans)
        self._streams.publish(request.proxy, event)
        self._journal.add(request.id, event.choice, event.token_ids)
        if not request.open_choices and not request.ended:
            request.finish_reason = reason
            self._end(request)

    def _proxy_gone(self, proxy: Life) -> None:
        for request in list(self._requests.values()):
            if request.proxy == proxy:
                self._fail(request, f"proxy {proxy[0]} is gone", "proxy")
