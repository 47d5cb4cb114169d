"""The decode instance: admit, receive, join, step, emit, release.

The event loop owns every request and all pages; the compute thread only runs the batch's step.
Changes to the batch wait for the moment between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor

import grpc

from millrace.core.decode_placement import pages_needed
from millrace.core.errors import CapacityError, MillraceError
from millrace.decode.journal import Journal
from millrace.decode.kv_servicer import KvReceiverServicer
from millrace.decode.request import DecodeRequest
from millrace.decode.servicer import DecodeServicer
from millrace.decode.token_streams import Life, TokenStreams, life_of
from millrace.engine.decode_batch import DecodeBatch, Sequence, TokenOut
from millrace.engine.sampler import Sampler
from millrace.engine.sampling_spec import finish_reason
from millrace.transfer.receive_manager import ReceiveManager
from millrace.wire.pb import common_pb2, decode_pb2, scheduler_pb2, transfer_pb2
from millrace.worker.codec import logprobs_message, span
from millrace.worker.host import WorkerContext
from millrace.worker.link import request_failed, request_released

log = logging.getLogger(__name__)


class DecodeRole:
    """Everything an instance holds for its requests is in `_requests`."""

    name = "decode"

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._id = context.incarnation.id
        self._pool = context.engine.pool
        self._page_tokens = context.engine.layout.page_tokens
        self._max_batch = context.config.engine.max_batch
        self._requests: dict[str, DecodeRequest] = {}
        self._joining: deque[DecodeRequest] = deque()
        self._leaving: list[DecodeRequest] = []
        self._wake = asyncio.Event()
        self._emptied = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._streams = TokenStreams(context.config.scheduler.lease_s, self._proxy_gone)
        self._journal = Journal(context.store, context.config.store.journal_interval_ms / 1e3)
        self._batch = DecodeBatch(
            context.engine.runner, context.engine.pool, Sampler(), max_batch=self._max_batch
        )
        self._receiver = ReceiveManager(
            transport=context.transport,
            layout=context.engine.layout,
            storage=context.engine.pool.storage,
            identity=(context.incarnation.id, context.incarnation.generation),
            config=context.config.transfer,
            on_first_tokens=self._first_tokens,
            on_landed=self._landed,
            on_failed=self._receive_failed,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode-compute")

    def attach(self, server: grpc.aio.Server) -> None:
        KvReceiverServicer(self._receiver).add_to(server)
        DecodeServicer(self._streams, life_of(self._context.incarnation)).add_to(server)

    def fill_register(self, register: scheduler_pb2.Register) -> None:
        register.role = self.name
        register.max_batch = self._max_batch

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        running = sum(r.joined for r in self._requests.values())
        return scheduler_pb2.Heartbeat(
            free_pages=self._pool.free_pages,
            running=running,
            waiting=len(self._requests) - running,
        )

    async def wait_idle(self) -> None:
        while self._requests:
            self._emptied.clear()
            await self._emptied.wait()

    def on_command(self, command: scheduler_pb2.WorkerCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "admit_decode":
            self._admit(command.admit_decode.request)
        elif kind == "cancel" and (request := self._requests.get(command.cancel.request_id)):
            self._end(request)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._journal.run())
            emitted: Many[TokenOut] = ()
            while True:
                self._apply_changes()
                if self._batch.size:
                    step = loop.run_in_executor(self._thread, self._batch.step)
                    self._publish(emitted)  # while the next step computes
                    emitted = await step
                else:
                    self._publish(emitted)
                    emitted = ()
                    await self._wake.wait()
                self._wake.clear()

    async def drop_all(self, reason: str) -> None:
        log.info("dropping %d requests: %s", len(self._requests), reason)
        for request in list(self._requests.values()):
            self._end(request)
        await self.wait_idle()

    async def close(self) -> None:
        self._thread.shutdown(wait=True)
        await self._receiver.close()
        self._pool.check_integrity(expected_used=0)

    # -- a request's life

    def _admit(self, spec: common_pb2.RequestSpec) -> None:
        needed = pages_needed(
            spec.prompt_tokens, spec.sampling.max_tokens, spec.sampling.n, self._page_tokens
        )
        try:
            request = DecodeRequest.of(spec, self._pool.allocate(needed))
        except CapacityError as error:
            self._context.send(request_failed(spec.request_id, str(error), retryable=True))
            return
        self._requests[request.id] = request
        prompt_pages = -(-request.prompt_tokens // self._page_tokens)
        self._receiver.admit(request.id, request.pages[:prompt_pages], request.prompt_tokens)
        if request.sampling.needs_prompt_ids:
            self._spawn(self._fetch_prompt(request))

    def _first_tokens(self, request_id: str, message: transfer_pb2.FinishPrefillRequest) -> None:
        request = self._requests.get(request_id)
        if request is None or request.ended:
            return
        request.first_token_ids = [t.token_id for t in message.first_tokens]
        request.open_choices = set(range(len(message.first_tokens)))
        for choice, first in enumerate(message.first_tokens):
            event = decode_pb2.TokenEvent(
                request_id=request_id, choice=choice, token_ids=[first.token_id], stop_token_id=-1
            )
            if request.sampling.logprobs >= 0:
                event.logprobs.append(first.logprobs)
            if choice == 0:
                event.spans.extend(message.spans)
                event.prompt_logprobs.extend(message.prompt_logprobs)
                event.cached_tokens = message.cached_tokens
            self._emit(request, event, finish_reason(request.sampling, 1, first.token_id))
        self._try_join(request)

    def _landed(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None or request.ended:
            return
        request.landed = True
        request.spans.append(
            span("kv_transfer", self._id, request.admitted_s, request.clock.now_s())
        )
        self._try_join(request)

    def _receive_failed(self, request_id: str, message: str) -> None:
        request = self._requests.get(request_id)
        if request is None or request.ended:
            return
        log.warning("request %s: %s", request_id, message)
        self._fail(request, message, retryable=True)

    async def _fetch_prompt(self, request: DecodeRequest) -> None:
        try:
            request.prompt_ids = await self._context.store.prompt_ids(request.id)
        except MillraceError as error:
            self._fail(request, str(error), retryable=False)
        else:
            self._try_join(request)

    def _try_join(self, request: DecodeRequest) -> None:
        if request.can_join and not request.joined:
            request.joined = True
            self._joining.append(request)
            self._wake.set()

    def _fail(self, request: DecodeRequest, message: str, *, retryable: bool) -> None:
        if not request.ended:
            self._context.send(request_failed(request.id, message, retryable=retryable))
            self._end(request)

    def _end(self, request: DecodeRequest) -> None:
        """Takes the request out at the next step boundary and frees what it holds."""
        if not request.ended:
            request.ended = True
            self._leaving.append(request)
            self._wake.set()

    # -- between two steps

    def _apply_changes(self) -> None:
        for request in self._leaving:
            self._batch.remove(request.id)
            self._spawn(self._release(request))
        self._leaving.clear()
        while self._joining:
            request = self._joining[0]
            if not request.ended:
                if self._batch.size + len(request.open_choices) > self._max_batch:
                    break
                self._join(request)
            self._joining.popleft()

    def _join(self, request: DecodeRequest) -> None:
        shared = request.prompt_tokens // self._page_tokens
        own = (len(request.pages) - shared) // request.sampling.n
        for choice in sorted(request.open_choices):
            first = shared + choice * own
            pages = request.pages[:shared] + request.pages[first : first + own]
            if choice and request.prompt_tokens % self._page_tokens:
                self._pool.copy_page(request.pages[shared], pages[shared])
            self._batch.add(
                Sequence(
                    request_id=request.id,
                    choice=choice,
                    pages=pages,
                    prompt_tokens=request.prompt_tokens,
                    first_token_id=request.first_token_ids[choice],
                    spec=request.sampling,
                    prompt_ids=request.prompt_ids,
                )
            )
        request.first_step_s = request.clock.now_s()
        self._context.send(
            scheduler_pb2.WorkerMessage(
                decode_started=scheduler_pb2.DecodeStarted(request_id=request.id)
            )
        )

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
            self._context.send(request_released(request.id))
        self._emptied.set()

    # -- tokens out

    def _publish(self, outs: Many[TokenOut]) -> None:
        for out in outs:
            request = self._requests.get(out.request_id)
            if request is None or request.ended:
                continue
            if out.error:
                self._fail(request, out.error, retryable=False)
                continue
            event = decode_pb2.TokenEvent(
                request_id=out.request_id,
                choice=out.choice,
                token_ids=[out.token_id],
                stop_token_id=-1,
            )
            if (logprobs := logprobs_message(out.logprobs)) is not None:
                event.logprobs.append(logprobs)
            if request.first_step_s is not None:
                request.spans.append(
                    span(
                        "first_decode_step",
                        self._id,
                        request.first_step_s,
                        request.clock.now_s(),
                        batch=self._batch.size,
                    )
                )
                request.first_step_s = None
            self._emit(request, event, out.finish_reason)

    def _emit(self, request: DecodeRequest, event: decode_pb2.TokenEvent, reason: str) -> None:
        request.generated_tokens += len(event.token_ids)
        if reason:
            event.finish_reason = reason
            if reason == "stop":
                event.stop_token_id = event.token_ids[-1]
            request.open_choices.discard(event.choice)
            if not request.open_choices:
                event.spans.extend(request.spans)
        self._streams.publish(request.proxy, event)
        self._journal.add(request.id, event.choice, event.token_ids)
        if not request.open_choices:
            request.finish_reason = reason
            self._end(request)

    def _proxy_gone(self, proxy: Life) -> None:
        for request in list(self._requests.values()):
            if request.proxy == proxy:
                self._fail(request, f"proxy {proxy[0]} is gone", retryable=False)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
