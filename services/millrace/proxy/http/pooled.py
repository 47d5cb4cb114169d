"""The endpoints that answer with vectors: embeddings, scores and rankings."""

from __future__ import annotations

import time
import uuid

from millrace.proxy.http.asgi import Receive, Scope, Send, receive_body
from millrace.proxy.http.client import Client
from millrace.proxy.http.generate import Runs, Services
from millrace.proxy.reply.builder import Arrival
from millrace.proxy.reply.pooled import PooledReply


class PooledEndpoint:
    """Answers bodies of one route of `POOLED_PATHS`, with a prefill-only request per text."""

    def __init__(self, services: Services, path: str) -> None:
        self._services = services
        self._path = path
        self._runs = Runs(services)
        self._builder = services.builder(chat=False)

    async def build(self, body: bytes, arrival: Arrival) -> PooledReply:
        """Reads a body; returns the reply, whose requests are ready to be submitted.

        Raises ApiError naming the field.
        """
        services = self._services
        asked = services.pooled.read(self._path, body)
        prompts = await services.prompts.read_texts(
            asked.texts, add_special_tokens=asked.add_special_tokens
        )
        prompts = await self._runs.with_blocks(prompts, asked.options)
        reply = PooledReply(
            asked,
            response_id=asked.id_prefix + uuid.uuid4().hex,
            created=int(arrival.unix_s),
            model=services.limits.model,
            progress=self._builder.progress(arrival),
        )
        self._builder.requests(reply.response_id, reply, prompts, asked.options, arrival)
        return reply

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        at, unix_s = time.monotonic(), time.time_ns() / 1e9
        body = await receive_body(scope, receive, self._services.config.proxy.max_body_bytes)
        arrival = self._runs.arrival(scope, at, unix_s)
        reply = await self.build(body, arrival)
        self._services.gateway.admit(len(reply.progress.requests))
        client = Client(receive, send, reply.response_id)
        return await self._runs.send_whole(reply, client, arrival)
