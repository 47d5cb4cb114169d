"""/v1/batches: creates, lists, shows and cancels batches."""

from __future__ import annotations

import orjson

from millrace.proxy.batches.batch import Batch
from millrace.proxy.batches.service import Batches
from millrace.proxy.files.pages import PageWanted
from millrace.proxy.http.asgi import Receive, Scope, Send, receive_body, send_json
from millrace.proxy.http.files import listed
from millrace.proxy.http.query import number, query_of
from millrace.proxy.http.tenants import Tenants
from millrace.proxy.request.batch_bodies import BATCH
from millrace.proxy.request.reading import read_body

BATCHES_PATH = "/v1/batches"
BATCH_PATH = BATCHES_PATH + "/{batch_id}"

_MOST_LISTED = 100
_MOST_BODY_BYTES = 1 << 20


class BatchEndpoints:
    """Answers the requests about batches."""

    def __init__(self, batches: Batches, tenants: Tenants) -> None:
        self._batches = batches
        self._tenants = tenants

    async def create_or_list(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answers POST and GET of all batches."""
        tenant = self._tenants.of(scope)
        if scope["method"] == "POST":
            fields = read_body(BATCH, await receive_body(scope, receive, _MOST_BODY_BYTES))
            return await _send(send, await self._batches.create(fields, tenant))
        query = query_of(scope)
        limit = number(query, "limit", 20, 1, _MOST_LISTED)
        wanted = PageWanted(limit=limit, after=query.get("after"))
        page = await self._batches.page(tenant, wanted)
        await send_json(send, 200, orjson.dumps(listed(page)))
        return 200

    async def retrieve(self, scope: Scope, receive: Receive, send: Send) -> int:
        return await _send(send, await self._batches.find(*self._named(scope)))

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> int:
        return await _send(send, await self._batches.cancel(*self._named(scope)))

    def _named(self, scope: Scope) -> tuple[str, str]:
        """Returns the id of the batch and the tenant."""
        return scope["path_params"]["batch_id"], self._tenants.of(scope)


async def _send(send: Send, batch: Batch) -> int:
    await send_json(send, 200, orjson.dumps(batch.document()))
    return 200
