"""Resumable streams: sends them at first, and again to a client that comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from millrace.core.config import ProxyConfig
from millrace.proxy.errors import ApiError, bad_field, shown, unavailable
from millrace.proxy.http.asgi import Receive, Scope, Send, header
from millrace.proxy.http.client import Client, send_part, send_parts, start_stream, until_disconnect
from millrace.proxy.http.endpoints.request_ids import candidates
from millrace.proxy.http.keep_alive import KeepAlive
from millrace.proxy.http.tenants import Tenants
from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.prompts import EnginePrompt
from millrace.proxy.reply.builder import Arrival
from millrace.proxy.reply.event_numbers import EventId, EventNumbers, read_event_id
from millrace.proxy.reply.reply import EventReply, GeneratingReply
from millrace.proxy.request.options import Options
from millrace.proxy.streams.apis import APIS
from millrace.proxy.streams.lives import RESTORED_S
from millrace.proxy.streams.owned_stream import OwnedStream
from millrace.proxy.streams.owner import OwnedStreams
from millrace.proxy.streams.reader import StreamReader
from millrace.proxy.streams.replay import Replays
from millrace.proxy.streams.source import (
    RESUMABLE_HEADER,
    StreamSource,
    check_resumable,
    source_of,
)
from millrace.state.store import RequestStore, StoreError
from millrace.state.streams import StreamRecord

STREAM_PATH = "/v1/requests/{request_id}/stream"
LAST_EVENT_HEADER = "last-event-id"
#: How often a stream is looked for that the store does not have.
_LOOK_S = 0.1


def wants_resumable(scope: Scope, config: ProxyConfig) -> bool:
    """Whether the client asks for a resumable stream. Raises ApiError naming the header."""
    text = header(scope, RESUMABLE_HEADER.encode())
    if text not in (None, "0", "1"):
        raise bad_field(RESUMABLE_HEADER, f"must be 0 or 1, got {shown(text)}.")
    if text == "1" and not config.resume_grace_s:
        wrong = "this server resumes no streams (proxy.resume_grace_s is 0)."
        raise bad_field(RESUMABLE_HEADER, wrong, "unsupported_parameter")
    return text == "1"


class Limits(Protocol):
    """Holds requests to the limits of their keys and of time."""

    async def admit(self, reply: GeneratingReply, arrival: Arrival) -> None:
        """Raises ApiError (429, 503): then nothing is reserved."""

    def limit_time(self, reply: GeneratingReply) -> asyncio.TimerHandle | None:
        """Fails the response when its time is over."""

    def end(self, reply: GeneratingReply, arrival: Arrival, *, handed_on: bool = False) -> None:
        """Cancels the unfinished requests and settles their limits, unless `handed_on`."""


class ResumableSender:
    """Starts resumable streams and sends them to their first clients."""

    def __init__(
        self,
        owned: OwnedStreams,
        model: ServedModel,
        config: ProxyConfig,
        limits: Limits,
        api: str,
    ) -> None:
        """`api` is a key of `APIS`."""
        self._owned = owned
        self._model = model
        self._config = config
        self._limits = limits
        self._api = api

    async def answer(
        self,
        body: bytes,
        prompts: Sequence[EnginePrompt],
        options: Options,
        arrival: Arrival,
        client: Callable[[str], Client],
    ) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        check_resumable(prompts, options, trace=arrival.trace)
        build = APIS[self._api].build
        response_id, reply = build(self._model, prompts, options, arrival, EventNumbers())

        def source() -> StreamSource:
            name = self._model.name
            return source_of(body, name, prompts[0], response_id, arrival, api=self._api)

        stream = await self._start(source, reply, arrival)
        prompts_ahead = self._model.gateway.prompts
        keep_alive = KeepAlive(reply, prompts_ahead, self._config, response_id)
        try:
            return await _send(stream, client(response_id))
        finally:
            keep_alive.close()
            stream.leave()

    async def _start(
        self, source: Callable[[], StreamSource], reply: EventReply, arrival: Arrival
    ) -> OwnedStream:
        limits = self._limits
        await limits.admit(reply, arrival)
        timer = limits.limit_time(reply)

        def end(*, handed_on: bool) -> None:
            if timer is not None:
                timer.cancel()
            limits.end(reply, arrival, handed_on=handed_on)

        try:
            return await self._owned.start(source(), self._model, arrival.tenant, reply, end)
        except BaseException:
            end(handed_on=False)
            raise


async def _send(stream: OwnedStream, client: Client) -> int:
    """Sends the reply until its end, or until the client leaves: the request then goes on."""
    reply, progress, status, saved = stream.reply, stream.reply.progress, 499, False
    gone = asyncio.create_task(until_disconnect(client.receive))
    gone.add_done_callback(lambda _: progress.signal.wake())
    try:
        while not gone.done():
            finished, data = progress.finished, reply.take()
            if progress.error is not None:
                if status != 200:
                    raise progress.error
                data += reply.failure(progress.error)
            if not data and not finished:
                await progress.signal.wait()
                continue
            if stream.request.has_begun and not saved:
                saved = True
                await stream.save_begin()
            if status != 200:
                status = 200
                await start_stream(client)
            if finished:
                await client.send({"type": "http.response.body", "body": data})
                break
            await send_part(client, data)
        return status
    finally:
        gone.cancel()


class ResumeEndpoint:
    """Answers GET of `STREAM_PATH`: the events after `Last-Event-ID`, and those to come."""

    def __init__(
        self,
        owned: OwnedStreams,
        requests: RequestStore,
        replays: Replays,
        tenants: Tenants,
        config: ProxyConfig,
    ) -> None:
        self._owned = owned
        self._requests = requests
        self._replays = replays
        self._tenants = tenants
        self._keepalive_s = config.keepalive_s

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        after = _last_event(scope)
        stream_id, record = await self._find(scope, is_known=after is not None)
        reader = StreamReader(self._owned, self._requests, self._replays, stream_id, record, after)
        self._owned.shared.count("resumed")
        client = Client(receive, send, stream_id)
        return await send_parts(client, reader.parts(), self._keepalive_s)

    async def _find(self, scope: Scope, *, is_known: bool) -> tuple[str, StreamRecord]:
        """`is_known`: the client has events of the stream, which the store may have lost."""
        tenant, request_id = self._tenants.of(scope), scope["path_params"]["request_id"]
        looks = round(RESTORED_S / _LOOK_S) if is_known else 1
        try:
            for look in range(looks):
                if look:
                    await asyncio.sleep(_LOOK_S)
                for stream_id in candidates(tenant, request_id):
                    record = await self._owned.shared.store.get(stream_id)
                    if record is not None and record.tenant == tenant:
                        return stream_id, record
        except StoreError as error:
            raise unavailable("The store of streams does not answer.") from error
        message = f"No resumable stream with id {shown(request_id)}."
        raise ApiError(404, message, param="request_id", code="stream_not_found")


def _last_event(scope: Scope) -> EventId | None:
    text = header(scope, LAST_EVENT_HEADER.encode())
    if not text:
        return None
    found = read_event_id(text)
    if found is None:
        raise bad_field("Last-Event-ID", f"is no id of an event: {shown(text)}.")
    return found
