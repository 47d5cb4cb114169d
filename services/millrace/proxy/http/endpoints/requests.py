"""GET /v1/requests/{id}: how far a request is, why it is no further, and where its time went."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any

from millrace.core.scheduler.explanation.explain import Explanation
from millrace.proxy.errors import ApiError, shown, unavailable
from millrace.proxy.http.asgi import Receive, Scope, Send, send_document
from millrace.proxy.http.endpoints.generate import Services
from millrace.proxy.http.endpoints.request_ids import candidates
from millrace.proxy.streams.request_states import RequestStates
from millrace.wire.clients.scheduler_client import SchedulerUnavailable, UnknownRequest, explain

REQUEST_STATE_PATH = "/v1/requests/{request_id}"
EXPLAIN_PATH = REQUEST_STATE_PATH + "/explain"
TRACE_PATH = REQUEST_STATE_PATH + "/trace"

#: Fields of an explanation that name other requests, or instances.
_NAMING = ("before", "suspended_by", "waits_for")


class RequestEndpoints:
    """Answers about the requests of the client's own tenant."""

    def __init__(self, services: Services) -> None:
        self._schedulers = services.models.schedulers
        self._tenants = services.tenants
        self._waterfalls = services.waterfalls
        self._states = RequestStates(services.models, services.store, services.streams.shared.store)

    async def show(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        del receive  # a GET
        tenant, request_id = self._tenants.of(scope), scope["path_params"]["request_id"]
        for response_id in candidates(tenant, request_id):
            if (found := await self._states.find(response_id, tenant)) is not None:
                return await send_document(send, found.to_dict())
        raise unknown(request_id)

    async def explain(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Sends why a request waits, or waited, without the names of other requests.

        Returns the status that was sent. Raises ApiError before anything was sent.
        """
        del receive  # a GET
        tenant, request_id = self._tenants.of(scope), scope["path_params"]["request_id"]
        for response_id in candidates(tenant, request_id):
            if await self._states.find(response_id, tenant) is None:
                continue
            found = await self._explained(response_id)
            return await send_document(send, {"object": "millrace.explanation", **found})
        raise unknown(request_id)

    async def trace(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Sends the waterfall of a request that this proxy has, or had lately.

        Returns the status that was sent. Raises ApiError before anything was sent.
        """
        del receive  # a GET
        tenant, request_id = self._tenants.of(scope), scope["path_params"]["request_id"]
        found = await self._waterfalls.find(candidates(tenant, request_id), tenant)
        if found is None:
            raise unknown(request_id)
        return await send_document(send, {"object": "millrace.trace", **found})

    async def _explained(self, response_id: str) -> dict[str, Any]:
        """Returns what a client sees of the response's first request: of its last incarnation, and
        of its first. Raises ApiError.
        """
        names = (response_id, f"{response_id}-0")  # of one prompt, or of the first of several
        latest = await self._states.incarnation(response_id)
        found = await self._ask(latest)
        known = [one for name in names if name != latest and (one := await self._ask(name))]
        if found is None and not known:
            raise unknown(response_id)
        if found is None:
            return _shown(known[0])
        return {**_shown(found), "earlier": _shown(known[0])} if known else _shown(found)

    async def _ask(self, name: str) -> Explanation | None:
        """Returns what a scheduler knows of a request by its id there; None: none knows it."""
        try:
            for address in self._schedulers():
                with contextlib.suppress(UnknownRequest):
                    return await explain(address, name)
        except SchedulerUnavailable as error:
            raise unavailable(str(error)) from error
        return None


def _shown(found: Explanation) -> dict[str, Any]:
    return {name: value for name, value in asdict(found).items() if name not in _NAMING}


def unknown(request_id: str) -> ApiError:
    """Returns the error for a request that the tenant does not have, or no longer."""
    message = f"Request with id {shown(request_id)} not found."
    return ApiError(404, message, param="request_id", code="request_not_found")
