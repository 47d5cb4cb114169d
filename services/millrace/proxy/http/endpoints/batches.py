"""/v1/batches: creates, lists, shows and cancels batches."""

from __future__ import annotations

from millrace.proxy.batches.service import Batches
from millrace.proxy.files.pages import PageWanted
from millrace.proxy.http.asgi import Receive, Scope, Send, receive_body, send_document
from millrace.proxy.http.endpoints.files import listed
from millrace.proxy.http.query import number, query_of
from millrace.proxy.http.tenants import Tenants
from millrace.proxy.request.models.batch import BATCH
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
            batch = await self._batches.create(fields, tenant)
            return await send_document(send, batch.document())
        query = query_of(scope)
        limit = number(query, "limit", 20, 1, _MOST_LISTED)
        wanted = PageWanted(limit=limit, after=query.get("after"))
        page = await self._batches.page(tenant, wanted)
        return await send_document(send, listed(page))

    async def retrieve(self, scope: Scope, receive: Receive, send: Send) -> int:
        batch = await self._batches.find(*self._named(scope))
        return await send_document(send, batch.document())

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> int:
        batch = await self._batches.cancel(*self._named(scope))
        return await send_document(send, batch.document())

    def _named(self, scope: Scope) -> tuple[str, str]:
        """Returns the id of the batch and the tenant."""
        return scope["path_params"]["batch_id"], self._tenants.of(scope)
