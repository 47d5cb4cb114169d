"""The endpoints that answer with vectors: embeddings, scores and rankings."""

from __future__ import annotations

import time
import uuid

from millrace.proxy.http.asgi import Receive, Scope, Send, receive_body
from millrace.proxy.http.client import Client
from millrace.proxy.http.endpoints.generate import Entry, Runs, Services
from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.reply.builder import Arrival
from millrace.proxy.reply.pooled import PooledReply

#: Texts of one body that are at the fleet at a time. The scheduler's queue has room for 1,024
#: requests unless it is set (`scheduler.max_queue_requests`), and a body has up to 2,048 texts.
MOST_OPEN = 256


class PooledEndpoint:
    """Answers bodies of one route of `POOLED_PATHS`, with a prefill-only request per text."""

    def __init__(self, services: Services, path: str) -> None:
        self._services = services
        self._entry = Entry(services)
        self._path = path

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        at, unix_s = time.monotonic(), time.time_ns() / 1e9
        body = await receive_body(scope, receive, self._services.config.proxy.max_body_bytes)
        arrival = self._entry.arrival(scope, at, unix_s)
        model = self._entry.model(body, scope, arrival.id_digits)
        runs = Runs(self._services, model, most_open=MOST_OPEN)
        reply = await self._build(body, scope, arrival, model, runs)
        model.gateway.admit(min(len(reply.progress.requests), MOST_OPEN))
        client = Client(receive, send, reply.response_id)
        return await runs.send_whole(reply, client, arrival)

    async def _build(
        self, body: bytes, scope: Scope, arrival: Arrival, model: ServedModel, runs: Runs
    ) -> PooledReply:
        """Reads a body; returns the reply, whose requests are ready to be submitted.

        Raises ApiError naming the field.
        """
        asked = model.pooled.read(self._path, body)
        arrival = self._entry.stated(scope, arrival, asked.options)
        prompts = await model.prompts.read_texts(
            asked.texts,
            add_special_tokens=asked.add_special_tokens,
            salt=asked.options.cache_salt,
        )
        prompts = await runs.prepared(prompts, asked.options)
        builder = model.builder(chat=False)
        reply = PooledReply(
            asked,
            response_id=asked.id_prefix + uuid.uuid4().hex,
            created=int(arrival.unix_s),
            model=model.name,
            progress=builder.progress(arrival),
        )
        builder.requests(reply.response_id, reply, prompts, asked.options, arrival)
        return reply
