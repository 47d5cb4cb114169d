"""GET /v1/requests/{id}: how far a request is, asked of any replica."""

from __future__ import annotations

from millrace.proxy.errors import ApiError, shown
from millrace.proxy.http.asgi import Receive, Scope, Send, send_document
from millrace.proxy.http.generate import Services
from millrace.proxy.http.request_ids import candidates
from millrace.proxy.streams.request_states import RequestStates

REQUEST_STATE_PATH = "/v1/requests/{request_id}"


class RequestEndpoints:
    """Answers about the requests of the client's own tenant."""

    def __init__(self, services: Services) -> None:
        self._tenants = services.tenants
        self._states = RequestStates(services.gateway, services.store, services.streams.store)

    async def show(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        del receive  # a GET
        tenant, request_id = self._tenants.of(scope), scope["path_params"]["request_id"]
        for response_id in candidates(tenant, request_id):
            if (found := await self._states.find(response_id, tenant)) is not None:
                return await send_document(send, found.to_dict())
        raise unknown(request_id)


def unknown(request_id: str) -> ApiError:
    """Returns the error for a request that the tenant does not have, or no longer."""
    message = f"Request with id {shown(request_id)} not found."
    return ApiError(404, message, param="request_id", code="request_not_found")
