"""Answers a batch's requests by the endpoints themselves: the same path as requests over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from millrace.core.weights import DEFAULT_TENANT
from millrace.proxy.batches.lines import Answer, LineRequest, answer_of
from millrace.proxy.errors import ApiError, bad_field
from millrace.proxy.http.anthropic import error_body
from millrace.proxy.http.asgi import Message, Receive, Scope, Send
from millrace.proxy.http.endpoints.objectives import CLASS_HEADER
from millrace.proxy.http.tenants import EXCHANGE
from millrace.proxy.request.models.batch import BATCH_ENDPOINTS
from millrace.proxy.tenancy.caller import Caller
from millrace.proxy.tenancy.exchange import Exchange
from millrace.proxy.tenancy.key_ring import KeyRing

log = logging.getLogger(__name__)

#: Answers a request and returns the status; raises ApiError while nothing was sent.
Endpoint = Callable[[Scope, Receive, Send], Awaitable[int]]

#: Fields of bodies that make no sense in a batch: nobody reads along.
_REFUSED = ("stream", "background")


class BatchCalls:
    """Calls the endpoints in the name of a tenant."""

    def __init__(self, endpoints: Mapping[str, Endpoint], keys: KeyRing, slo_class: str) -> None:
        """`endpoints` by path: all of BATCH_ENDPOINTS. Calls are of the class `slo_class`.

        The limits and models of the tenant in `keys` hold, whichever key created the batch.
        """
        self._endpoints = {path: endpoints[path] for path in BATCH_ENDPOINTS}
        self._keys = keys
        self._slo_class = slo_class

    async def ask(self, path: str, request: LineRequest, tenant: str) -> Answer:
        """Returns the endpoint's answer to a request, or its error.

        Cancelling the caller cancels the request.
        """
        body, like = request.body, {"path": path, "headers": ()}
        try:
            for name in _REFUSED:
                if body.get(name):
                    raise bad_field(name, "must be false in a batch.")
            if body.get("millrace") is not None:
                raise bad_field(
                    "millrace", "must be absent in a batch, which has a class of its own."
                )
            if path == "/v1/responses":  # its answer is in the output file already
                body = {"store": False, **body}
            call = _Call(json.dumps(body).encode())  # orjson writes no integer above 64 bits
            scope = _scope(path, self._caller(tenant), self._slo_class)
            await self._endpoints[path](scope, call.receive, call.send)
        except ApiError as error:
            return answer_of(error, error_body(like, error))
        except Exception:
            log.exception("%s failed in a batch", path)
            failed = ApiError(500, "Internal error.")
            return answer_of(failed, error_body(like, failed))
        return call.answer()

    def _caller(self, tenant: str) -> Caller:
        """Returns the sender of a tenant's batches, which may use the class of batches."""
        if tenant == DEFAULT_TENANT:
            found = self._keys.anonymous
        else:
            found = self._keys.tenant(tenant) or Caller(tenant=tenant)
        return replace(found, slo_classes=())


def _scope(path: str, caller: Caller, slo_class: str) -> MutableMapping[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (CLASS_HEADER.encode(), slo_class.encode()),
        ],
        EXCHANGE: Exchange(caller=caller, arrived_at=time.monotonic()),
    }


class _Call:
    """The client's side of one call: sends the body, and keeps the answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 500
        self._request_id: str | None = None
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        """Returns the body first. Then waits: this client stays until the call is cancelled."""
        body, self._body = self._body, None
        if body is None:
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = dict(message["headers"])
            request_id = headers.get(b"x-request-id")
            self._request_id = None if request_id is None else request_id.decode("latin-1")
        else:
            self._parts.append(message.get("body", b""))

    def answer(self) -> Answer:
        return Answer(status=self._status, request_id=self._request_id, body=b"".join(self._parts))
