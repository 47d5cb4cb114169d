"""The two completion endpoints: read a request, submit it and send its answer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from millrace.core.config import Config
from millrace.core.request_spec import Constraint
from millrace.grammar.source import GrammarError
from millrace.proxy.background import Background
from millrace.proxy.batches.service import Batches
from millrace.proxy.beams.answer import BeamAnswer
from millrace.proxy.conversations import Conversations
from millrace.proxy.errors import NO_RETRY, ApiError, bad_field
from millrace.proxy.files.store import Files
from millrace.proxy.http.asgi import (
    JSON,
    Receive,
    Scope,
    Send,
    header,
    receive_body,
    send_json,
)
from millrace.proxy.http.client import Client, send_part, start_stream, until_disconnect
from millrace.proxy.http.endpoints.objectives import (
    Objectives,
    wants_early_failure,
    wants_trace,
)
from millrace.proxy.http.endpoints.request_ids import chosen_id, id_digits
from millrace.proxy.http.endpoints.streams import ResumableSender, wants_resumable
from millrace.proxy.http.keep_alive import KeepAlive
from millrace.proxy.http.tenants import Tenants, exchange_of
from millrace.proxy.metrics import ProxyMetrics
from millrace.proxy.models.asked_model import asked_model
from millrace.proxy.models.models import Models
from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.prompts import EnginePrompt
from millrace.proxy.reply.builder import Arrival
from millrace.proxy.reply.reply import DocumentReply, EventReply, GeneratingReply, StreamReply
from millrace.proxy.request.options import Options
from millrace.proxy.responses import StoredResponses
from millrace.proxy.streams.owner import OwnedStreams
from millrace.proxy.streams.replay import Replays
from millrace.proxy.tenancy.caller import Caller
from millrace.proxy.tenancy.costs import reserved_cost, used_cost
from millrace.proxy.tenancy.limiter import Limiter
from millrace.proxy.tenancy.stored_tenants import StoredTenants
from millrace.proxy.tracing.traces import RequestTraces
from millrace.proxy.tracing.waterfalls import Waterfalls
from millrace.state.store import RequestStore
from millrace.telemetry.tracing.context import trace_id_of

#: A reason why a constraint can't be compiled may repeat it.
_MOST_REASON = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The objects that the endpoints share. `stored_tenants` is None if the store keeps none."""

    config: Config
    models: Models
    store: RequestStore
    streams: OwnedStreams
    replays: Replays
    metrics: ProxyMetrics
    objectives: Objectives
    tenants: Tenants
    limiter: Limiter
    stored_tenants: StoredTenants | None
    traces: RequestTraces
    waterfalls: Waterfalls
    responses: StoredResponses
    conversations: Conversations
    background: Background
    files: Files
    batches: Batches


class Entry:
    """Takes a request in: its headers, and the model that it names."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def arrival(self, scope: Scope, at: float, unix_s: float) -> Arrival:
        """Raises ApiError naming the wrong header, or (403) the class that the key may not use."""
        exchange, chosen = exchange_of(scope), chosen_id(scope)
        caller = exchange.caller
        with self._counted(caller):
            slo = self._services.objectives.read(scope, caller.slo_classes, {})
        span, context = self._services.traces.begin(header(scope, b"traceparent") or "", unix_s)
        exchange.trace_id = trace_id_of(context)
        return Arrival(
            at=at,
            unix_s=unix_s,
            slo=slo,
            tenant=caller.tenant,
            exchange=exchange,
            trace=wants_trace(scope),
            fails_early=wants_early_failure(scope, {}),
            traceparent=context,
            scope=span,
            id_digits=id_digits(caller.tenant, chosen) if chosen else os.urandom(16).hex(),
        )

    def stated(self, scope: Scope, arrival: Arrival, options: Options) -> Arrival:
        """Returns the arrival with the body's objectives, too. Raises ApiError as `arrival`."""
        body = options.objectives
        if not body:
            return arrival
        caller = exchange_of(scope).caller
        with self._counted(caller):
            slo = self._services.objectives.read(scope, caller.slo_classes, body)
        return replace(arrival, slo=slo, fails_early=wants_early_failure(scope, body))

    def model(self, body: bytes, scope: Scope, digits: str) -> ServedModel:
        """Returns the model that answers a body, for a request whose id has these digits.

        Raises ApiError: 404 without such a model, 403 if the key may not use it.
        """
        exchange = exchange_of(scope)
        with self._counted(exchange.caller):
            found = self._services.models.choose(asked_model(body), exchange.caller, digits)
        exchange.model = found.name
        return found

    @contextmanager
    def _counted(self, caller: Caller) -> Iterator[None]:
        """Counts a request that its sender may not make."""
        try:
            yield
        except ApiError as error:
            if error.status == 403:
                self._services.metrics.tenants.refused(caller.tenant, error.code or "")
            raise


class Runs:
    """Submits requests to one model and sends their answers, for all endpoints that generate."""

    def __init__(
        self, services: Services, model: ServedModel, *, most_open: int | None = None
    ) -> None:
        """`most_open`: so many requests of a reply are at the fleet at a time; None: all."""
        self._services = services
        self._model = model
        self._gateway = model.gateway
        self._most_open = most_open

    async def check_constraint(self, options: Options) -> None:
        """Compiles the constraint and the grammars of tools, on a thread.

        Raises ApiError with the reason if one can't be compiled.
        """
        if options.tools is not None:
            for field, grammar in options.tools.grammars:
                await self._compile(field, grammar)
        if options.sampling.constraint is not None:
            await self._compile(options.constraint_field, options.sampling.constraint)

    async def _compile(self, field: str, constraint: Constraint) -> None:
        try:
            await asyncio.shield(asyncio.wrap_future(self._model.grammars.prepare(constraint)))
        except GrammarError as error:
            reason = str(error)[:_MOST_REASON]
            raise bad_field(field, f"can't be compiled: {reason}") from error

    async def prepared(
        self, prompts: Sequence[EnginePrompt], options: Options
    ) -> list[EnginePrompt]:
        """Returns the prompts cut as the options say, with the hashes of their blocks.

        Raises ApiError naming the field.
        """
        prompts = [self._model.prompts.cut(prompt, options) for prompt in prompts]
        hasher = self._model.hasher
        return [replace(p, blocks=await hasher.blocks(p.ids, options)) for p in prompts]

    async def admit(self, reply: GeneratingReply, arrival: Arrival) -> None:
        """Holds the request to the limits of its key; after it the caller calls `end`.

        Raises ApiError (429, 503): then nothing is reserved.
        """
        if arrival.exchange is not None:
            await self._services.limiter.admit(
                arrival.exchange, reserved_cost(reply.progress.requests)
            )

    async def submit(self, reply: GeneratingReply) -> None:
        """Raises ApiError (503, 429). After an error the caller calls `end`."""
        progress = reply.progress
        for number, request in enumerate(progress.requests):
            if self._most_open is not None:
                while number - progress.ended >= self._most_open and not progress.finished:
                    await progress.signal.wait()
                if progress.finished:  # one has failed, or the client has left
                    return
            await self._gateway.submit(request)

    async def send_stream(
        self, reply: EventReply, client: Client, arrival: Arrival, settle: Settle | None = None
    ) -> int:
        """Submits the requests and sends their events; returns the status.

        `settle` runs before the last event is sent. Raises ApiError before anything was sent.
        """

        async def send() -> int:
            prompts, config = self._gateway.prompts, self._services.config.proxy
            keep_alive = KeepAlive(reply, prompts, config, client.response_id)
            try:
                return await _send_stream(reply, client, settle)
            finally:
                keep_alive.close()

        return await self._run(reply, client, arrival, send, self.submit)

    async def send_whole(
        self,
        reply: DocumentReply,
        client: Client,
        arrival: Arrival,
        settle: Settle | None = None,
        submit: Submit | None = None,
    ) -> int:
        """Submits the requests and sends their document. Otherwise as `send_stream`.

        `submit` generates the answers in another way than by submitting the requests.
        """

        async def send() -> int:
            return await _send_whole(reply, client, settle)

        return await self._run(reply, client, arrival, send, submit or self.submit)

    async def _run(
        self,
        reply: GeneratingReply,
        client: Client,
        arrival: Arrival,
        send: Callable[[], Awaitable[int]],
        submit: Submit,
    ) -> int:
        await self.admit(reply, arrival)
        timer = self.limit_time(reply)
        watch = asyncio.create_task(until_disconnect(client.receive))
        watch.add_done_callback(lambda _: self._leave(reply))
        try:
            await submit(reply)
            return await send()
        finally:
            watch.cancel()
            if timer is not None:
                timer.cancel()
            self.end(reply, arrival)

    def limit_time(self, reply: GeneratingReply) -> asyncio.TimerHandle | None:
        """Fails the response when `proxy.request_timeout_s` is over."""
        limit_s = self._services.config.proxy.request_timeout_s
        if not limit_s:
            return None
        error = ApiError(
            504,
            f"The answer was not complete within {limit_s:g} s.",
            code="timeout",
            headers=[NO_RETRY],
        )
        return asyncio.get_running_loop().call_later(limit_s, reply.progress.fail, error)

    def end(self, reply: GeneratingReply, arrival: Arrival, *, handed_on: bool = False) -> None:
        """Cancels the unfinished requests, settles their limits and exports the traces of all.

        `handed_on`: another replica continues them, and settles.
        """
        self._leave(reply)
        progress, exchange, limiter = reply.progress, arrival.exchange, self._services.limiter
        if exchange is not None and handed_on:
            limiter.hand_on(exchange)
        elif exchange is not None:
            limiter.settle(exchange, used_cost(progress.requests, progress.error))
        traces, tell = self._services.traces, self._gateway.keep_trace
        found = progress.requests, progress.error
        traces.end(arrival.scope, *found, arrival.at, tell, handed_on=handed_on)

    def _leave(self, reply: GeneratingReply) -> None:
        """Cancels the unfinished requests: the client is gone, or the answer has failed."""
        progress = reply.progress
        if progress.finished and progress.error is None:
            return
        error = progress.error
        reason = "disconnected" if error is None or error.code != "timeout" else "timeout"
        for request in progress.requests:
            self._gateway.leave(request, reason)
        progress.fail(ApiError(499, "The client closed the connection."))


class GenerateEndpoint:
    """Answers completion requests over raw ASGI; `chat` chooses between the two APIs."""

    def __init__(self, services: Services, *, chat: bool) -> None:
        self._services = services
        self._entry = Entry(services)
        self._chat = chat

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        at, unix_s = time.monotonic(), time.time_ns() / 1e9
        config = self._services.config.proxy
        body = await receive_body(scope, receive, config.max_body_bytes)
        arrival = self._entry.arrival(scope, at, unix_s)
        resumable = wants_resumable(scope, config)
        model = self._entry.model(body, scope, arrival.id_digits)
        runs, builder = Runs(self._services, model), model.builder(chat=self._chat)
        prompts, options = await self._read(body, model, runs)
        arrival = self._entry.stated(scope, arrival, options)
        searched = options.length_penalty is not None
        model.gateway.admit(len(prompts) * options.choices if searched else len(prompts))
        if resumable:
            client = partial(Client, receive, send)
            api = "chat" if self._chat else "completions"
            sender = ResumableSender(self._services.streams, model, config, runs, api)
            return await sender.answer(body, prompts, options, arrival, client)
        response_id, reply, _ = builder.build(prompts, options, arrival)
        one = Client(receive, send, response_id)
        if isinstance(reply, StreamReply):
            return await runs.send_stream(reply, one, arrival)
        submit = BeamAnswer(model, builder, options, arrival).submit if searched else None
        return await runs.send_whole(reply, one, arrival, submit=submit)

    async def _read(
        self, body: bytes, model: ServedModel, runs: Runs
    ) -> tuple[list[EnginePrompt], Options]:
        if self._chat:
            chat = model.bodies.read_chat(body)
            options = chat.options
            await runs.check_constraint(options)
            prompts = [await model.prompts.read_chat(chat.conversation)]
        else:
            completion = model.bodies.read_completion(body)
            options = completion.options
            await runs.check_constraint(options)
            prompts = await model.prompts.read_completion(completion)
        return await runs.prepared(prompts, options), options


#: Runs when an answer is complete, before its end is sent.
Settle = Callable[[], Awaitable[None]]
#: Generates the answers of a reply's requests. Raises ApiError.
Submit = Callable[[GeneratingReply], Awaitable[None]]


async def _send_whole(reply: DocumentReply, client: Client, settle: Settle | None) -> int:
    progress = reply.progress
    while not progress.finished:
        await progress.signal.wait()
    if progress.error is not None:
        raise progress.error
    if settle is not None:
        await settle()
    await send_json(client.send, 200, reply.document(), JSON + client.headers)
    return 200


async def _send_stream(reply: EventReply, client: Client, settle: Settle | None) -> int:
    """Sends all output that is ready in one piece. Raises ApiError before anything was sent."""
    progress = reply.progress
    while not (data := reply.take()) and not progress.finished:
        await progress.signal.wait()
    if progress.error is not None:
        raise progress.error
    await start_stream(client)
    while not progress.finished:
        if data:
            await send_part(client, data)
        else:
            await progress.signal.wait()
        data = reply.take()
    data += reply.take()
    if progress.error is not None:
        data += reply.failure(progress.error)
    elif settle is not None:
        await settle()
    await client.send({"type": "http.response.body", "body": data})
    return 200
