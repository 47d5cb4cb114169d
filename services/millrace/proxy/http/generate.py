"""The two completion endpoints: read a request, submit it and send its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from millrace.core.config import Config
from millrace.grammar.matcher import Grammars
from millrace.grammar.source import GrammarError
from millrace.proxy.background import Background
from millrace.proxy.batches.service import Batches
from millrace.proxy.errors import ApiError, bad_field
from millrace.proxy.files.store import Files
from millrace.proxy.fleet.gateway import Gateway
from millrace.proxy.fleet.prompts_ahead import PromptsAhead
from millrace.proxy.http.asgi import (
    JSON,
    Receive,
    Scope,
    Send,
    receive_body,
    send_json,
)
from millrace.proxy.http.objectives import Objectives, traceparent, wants_trace
from millrace.proxy.http.tenants import Tenants
from millrace.proxy.metrics import ProxyMetrics
from millrace.proxy.prompts import EnginePrompt, PromptReader
from millrace.proxy.reply.builder import Arrival, Builder
from millrace.proxy.reply.explain import waterfall
from millrace.proxy.reply.reply import DocumentReply, EventReply, GeneratingReply, StreamReply
from millrace.proxy.request.options import Limits, Options
from millrace.proxy.request.validation import Bodies
from millrace.proxy.responses import StoredResponses
from millrace.proxy.text.prefix import PromptHasher
from millrace.proxy.text.tokenizer import Tokenizer
from millrace.telemetry.otlp import TraceExporter

#: A silent stream gets a comment this often, so that no proxy in between closes the connection.
KEEPALIVE_S = 10.0

#: A reason why a constraint can't be compiled may repeat it.
_MOST_REASON = 1000

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The objects that the endpoints share. `traces` is None if no collector takes traces."""

    config: Config
    limits: Limits
    bodies: Bodies
    tokenizer: Tokenizer
    grammars: Grammars
    prompts: PromptReader
    gateway: Gateway
    metrics: ProxyMetrics
    objectives: Objectives
    tenants: Tenants
    traces: TraceExporter | None
    responses: StoredResponses
    background: Background
    files: Files
    batches: Batches

    def builder(self, *, chat: bool) -> Builder:
        """Returns a maker of requests and replies of one of the two APIs."""
        return Builder(
            self.limits,
            self.tokenizer,
            self.gateway.incarnation,
            self.prompts.parsers,
            chat=chat,
        )


class Runs:
    """Submits requests and sends their answers, for all endpoints that generate."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._gateway = services.gateway
        self._hasher = PromptHasher(services.config.engine)

    def arrival(self, scope: Scope, at: float, unix_s: float) -> Arrival:
        """Raises ApiError naming the wrong header."""
        return Arrival(
            at=at,
            unix_s=unix_s,
            slo=self._services.objectives.read(scope),
            tenant=self._services.tenants.of(scope),
            trace=wants_trace(scope),
            traceparent=traceparent(scope),
        )

    async def check_constraint(self, options: Options) -> None:
        """Compiles the constraint, on a thread. Raises ApiError with the reason if it can't be."""
        constraint = options.sampling.constraint
        if constraint is None:
            return
        try:
            await asyncio.shield(asyncio.wrap_future(self._services.grammars.prepare(constraint)))
        except GrammarError as error:
            reason = str(error)[:_MOST_REASON]
            raise bad_field(options.constraint_field, f"can't be compiled: {reason}") from error

    async def with_blocks(
        self, prompts: Sequence[EnginePrompt], options: Options
    ) -> list[EnginePrompt]:
        """Returns the prompts with the hashes of their blocks."""
        hasher = self._hasher
        return [replace(p, blocks=await hasher.blocks(p.ids, options)) for p in prompts]

    async def submit(self, reply: GeneratingReply) -> None:
        """Raises ApiError (503, 429). After an error the caller calls `end`."""
        for request in reply.progress.requests:
            await self._gateway.submit(request)

    async def send_stream(
        self, reply: EventReply, client: Client, arrival: Arrival, settle: Settle | None = None
    ) -> int:
        """Submits the requests and sends their events; returns the status.

        `settle` runs before the last event is sent. Raises ApiError before anything was sent.
        """

        async def send() -> int:
            return await _send_stream(reply, client, self._gateway.prompts, settle)

        return await self._run(reply, client, arrival, send)

    async def send_whole(
        self, reply: DocumentReply, client: Client, arrival: Arrival, settle: Settle | None = None
    ) -> int:
        """Submits the requests and sends their document. Otherwise as `send_stream`."""

        async def send() -> int:
            return await _send_whole(reply, client, settle)

        return await self._run(reply, client, arrival, send)

    async def _run(
        self,
        reply: GeneratingReply,
        client: Client,
        arrival: Arrival,
        send: Callable[[], Awaitable[int]],
    ) -> int:
        watch = asyncio.create_task(until_disconnect(client.receive))
        watch.add_done_callback(lambda _: self._leave(reply))
        try:
            await self.submit(reply)
            return await send()
        finally:
            watch.cancel()
            self.end(reply, arrival)

    def end(self, reply: GeneratingReply, arrival: Arrival) -> None:
        """Cancels the unfinished requests and exports the traces of all."""
        self._leave(reply)
        if self._services.traces is not None:
            for request in reply.progress.requests:
                found = waterfall(request, arrival.unix_s, self._gateway.incarnation.id)
                self._services.traces.export(found, arrival.traceparent)

    def _leave(self, reply: GeneratingReply) -> None:
        """Cancels the unfinished requests: the client is gone, or the answer has failed."""
        for request in reply.progress.requests:
            self._gateway.leave(request, "disconnected")
        reply.progress.fail(ApiError(499, "The client closed the connection."))


class GenerateEndpoint:
    """Answers completion requests over raw ASGI; `chat` chooses between the two APIs."""

    def __init__(self, services: Services, *, chat: bool) -> None:
        self._services = services
        self._gateway = services.gateway
        self._chat = chat
        self._runs = Runs(services)
        self._builder = services.builder(chat=chat)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        at, unix_s = time.monotonic(), time.time_ns() / 1e9
        body = await receive_body(scope, receive, self._services.config.proxy.max_body_bytes)
        arrival = self._runs.arrival(scope, at, unix_s)
        prompts, options = await self._read(body)
        self._gateway.admit(len(prompts))
        response_id, reply, _ = self._builder.build(prompts, options, arrival)
        client = Client(receive, send, response_id)
        if isinstance(reply, StreamReply):
            return await self._runs.send_stream(reply, client, arrival)
        return await self._runs.send_whole(reply, client, arrival)

    async def _read(self, body: bytes) -> tuple[list[EnginePrompt], Options]:
        services = self._services
        if self._chat:
            chat = services.bodies.read_chat(body)
            options = chat.options
            await self._runs.check_constraint(options)
            prompts = [await services.prompts.read_chat(chat.conversation)]
        else:
            completion = services.bodies.read_completion(body)
            options = completion.options
            await self._runs.check_constraint(options)
            prompts = await services.prompts.read_completion(completion)
        return await self._runs.with_blocks(prompts, options), options


#: Runs when an answer is complete, before its end is sent.
Settle = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Client:
    """The client of one request. Answers carry the response's id in a header."""

    receive: Receive
    send: Send
    response_id: str

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"x-request-id", self.response_id.encode())]


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


async def _send_stream(
    reply: EventReply, client: Client, prompts: PromptsAhead, settle: Settle | None
) -> int:
    """Sends all output that is ready in one piece. Raises ApiError before anything was sent."""
    progress = reply.progress
    keep_alive = _KeepAlive(reply, prompts)
    try:
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
    finally:
        keep_alive.close()


async def start_stream(client: Client) -> None:
    """Sends the status and the headers of a stream of events."""
    headers = _EVENT_STREAM + client.headers
    await client.send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_part(client: Client, data: bytes) -> None:
    """Sends a part of a stream that is not the last part."""
    await client.send({"type": "http.response.body", "body": data, "more_body": True})


class _KeepAlive:
    """Writes a comment to a stream that was silent for one to two intervals."""

    def __init__(self, reply: EventReply, prompts: PromptsAhead) -> None:
        self._reply = reply
        self._prompts = prompts
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(KEEPALIVE_S, self._tick)
        self._speaking: asyncio.Task[None] | None = None

    def close(self) -> None:
        self._timer.cancel()
        if self._speaking is not None:
            self._speaking.cancel()

    def _tick(self) -> None:
        if self._reply.silent and (self._speaking is None or self._speaking.done()):
            self._speaking = asyncio.create_task(self._speak())
        self._reply.silent = True
        self._timer = self._loop.call_later(KEEPALIVE_S, self._tick)

    async def _speak(self) -> None:
        text = await self._prompts.describe(self._reply.progress.requests)
        self._reply.comment((text or "waiting").encode())


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has left. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        continue
