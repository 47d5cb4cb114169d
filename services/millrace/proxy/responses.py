"""The stored responses of /v1/responses, for any replica, each for its tenant only."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from millrace.proxy.errors import ApiError, bad_field, reachable, shown
from millrace.proxy.reply.response import ResponseReply, event_of
from millrace.proxy.request.item_ids import is_response_id, response_of
from millrace.proxy.request.responses import REFERENCE, ResponseRequest, messages_of
from millrace.state.documents import Change, Document, DocumentStore

log = logging.getLogger(__name__)

Json = dict[str, Any]

#: Without a change for this long, a background response counts as lost with its replica.
LEASE_S = 15.0
#: The most references of an input: each may need a response of its own.
_MOST_REFERENCES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a response was made from: its input, the messages before the input, its streaming."""

    items: Sequence[Json]
    history: Sequence[Json]
    streams: bool

    def encoded(self) -> bytes:
        fields = {"items": self.items, "history": self.history, "streams": self.streams}
        return json.dumps(fields).encode()  # orjson writes no integer above 64 bits


def source_of(request: ResponseRequest, history: Sequence[Json]) -> Source:
    return Source(items=request.items, history=history, streams=request.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response as the store has it. A final response never changes."""

    body: Json
    source: Source
    final: bool

    @property
    def conversation(self) -> list[Json]:
        """The messages of the conversation with this response's output, without instructions."""
        source, output = self.source, messages_of(self.body["output"])
        return [*source.history, *messages_of(source.items), *output]


class StoredResponses:
    """Finds and keeps responses. Every method raises ApiError (503) if the store is unreachable."""

    def __init__(self, documents: DocumentStore, ttl_s: float) -> None:
        """Responses live for `ttl_s` from their creation."""
        self._documents = documents
        self._ttl_s = ttl_s

    async def create(self, reply: ResponseReply, tenant: str, source: Source) -> None:
        """Keeps a response, with its events so far if it runs in the background."""
        with reachable("responses"):
            await self._documents.create(
                reply.response_id,
                tenant=tenant,
                source=source.encoded(),
                change=_change(reply, 0),
                ttl_s=self._ttl_s,
            )

    async def keep(self, reply: ResponseReply, tenant: str, source: Source) -> None:
        """Keeps a complete response. If the store is out of reach, its client has it all the same.

        Raises no ApiError.
        """
        try:
            await self.create(reply, tenant, source)
        except ApiError as error:
            log.warning("response %s was not stored: %s", reply.response_id, error)

    async def save(self, reply: ResponseReply, first_event: int) -> bool:
        """Writes the state and the events from `first_event` on; renews the lease.

        Returns False if the response was cancelled or deleted: its work ends.
        """
        with reachable("responses"):
            return await self._documents.update(reply.response_id, _change(reply, first_event))

    async def find(self, response_id: str, tenant: str) -> StoredResponse:
        """Raises ApiError (404) unless the tenant has this response.

        Ends a background response whose replica is gone.
        """
        found = await self._get(response_id, tenant)
        if found.lost:
            body = _failed(found.body)
            start = len(await self.events(response_id, 0))
            event = event_of("response.failed", start, response=body)
            await self._settle(response_id, body, start, [event])
            found = await self._get(response_id, tenant)
        return StoredResponse(
            body=orjson.loads(found.body),
            source=Source(**orjson.loads(found.source)),
            final=found.final,
        )

    async def cancel(self, response_id: str, tenant: str) -> Json:
        """Ends a background response, whichever replica runs it; returns it as it is then."""
        found = await self.find(response_id, tenant)
        if not found.body["background"]:
            raise ApiError(
                400, "Only a response with 'background' set can be cancelled.", param="response_id"
            )
        if not found.final:
            await self._settle(response_id, found.body | {"status": "cancelled"}, 0, ())
            found = await self.find(response_id, tenant)
        return found.body

    async def delete(self, response_id: str, tenant: str) -> None:
        await self._get(response_id, tenant)
        with reachable("responses"):
            await self._documents.delete(response_id)

    async def events(self, response_id: str, start: int) -> list[bytes]:
        """Returns a background response's events from number `start` on, server-sent."""
        with reachable("responses"):
            return await self._documents.events(response_id, start)

    async def history(self, response_id: str, tenant: str) -> list[Json]:
        """Returns the messages that a new response continues. Raises ApiError naming the field."""
        name = "previous_response_id"
        try:
            found = await self.find(response_id, tenant)
        except ApiError as error:
            if error.status != 404:
                raise
            raise ApiError(404, error.message, param=name, code=error.code) from None
        if found.body["status"] not in ("completed", "incomplete"):
            raise bad_field(name, f"the response is {found.body['status']}, and has no output.")
        return found.conversation

    async def referenced(self, items: list[Json], tenant: str, field: str = "input") -> list[Json]:
        """Returns the items of `field` with the stored items in the place of references.

        Raises ApiError (404) naming a reference to an item that the tenant has not stored.
        """
        references = [item["id"] for item in items if item["type"] == REFERENCE]
        if not references:
            return items
        if len(references) > _MOST_REFERENCES:
            wrong = f"has {len(references)} references; at most {_MOST_REFERENCES} are allowed."
            raise bad_field(field, wrong)
        stored: dict[str, Json] = {}
        for response_id in dict.fromkeys(map(response_of, references)):
            if response_id is not None:
                stored |= await self._items(response_id, tenant)
        found = []
        for place, item in enumerate(items):
            if item["type"] == REFERENCE and item["id"] not in stored:
                message = (
                    f"Item with id {shown(item['id'])} not found: no stored response of this key "
                    "has it."
                )
                raise ApiError(404, message, param=f"{field}[{place}].id", code="item_not_found")
            found.append(stored[item["id"]] if item["type"] == REFERENCE else item)
        return found

    async def _items(self, response_id: str, tenant: str) -> dict[str, Json]:
        """Returns the items of a response by their ids; none without such a response."""
        try:
            found = await self.find(response_id, tenant)
        except ApiError as error:
            if error.status != 404:
                raise
            return {}
        return {item["id"]: item for item in (*found.source.items, *found.body["output"])}

    async def close(self) -> None:
        await self._documents.close()

    async def _get(self, response_id: str, tenant: str) -> Document:
        found = None
        if is_response_id(response_id):
            with reachable("responses"):
                found = await self._documents.get(response_id)
        if found is None or found.tenant != tenant:
            message = f"Response with id {shown(response_id)} not found."
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return found

    async def _settle(
        self, response_id: str, body: Json, first_event: int, events: Sequence[bytes]
    ) -> None:
        change = Change(body=orjson.dumps(body), first_event=first_event, events=events, final=True)
        with reachable("responses"):
            await self._documents.update(response_id, change)


def _change(reply: ResponseReply, first_event: int) -> Change:
    return Change(
        body=reply.document(),
        first_event=first_event,
        events=reply.events[first_event:],
        final=reply.status not in ("queued", "in_progress"),
        lease_s=LEASE_S,
    )


def _failed(body: bytes) -> Json:
    message = "The server that generated this response has stopped."
    error = {"code": "server_error", "message": message}
    document: Json = orjson.loads(body) | {"status": "failed", "error": error}
    return document
