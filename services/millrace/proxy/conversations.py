"""The conversations of /v1/conversations, for any replica, each for its tenant only."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from millrace.proxy.errors import ApiError, bad_field, reachable, shown
from millrace.proxy.request.item_ids import is_conversation_id, new_conversation_id
from millrace.proxy.request.responses import messages_of
from millrace.state.documents import Change, Document, DocumentStore

log = logging.getLogger(__name__)

Json = dict[str, Any]

#: The most bytes of a conversation's document: each change reads and writes all of it.
_MOST_BYTES = 16 << 20
#: How often a change is tried again when another one came first.
_TRIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation: its own fields, and its items in order."""

    fields: Json
    items: Sequence[Json]

    @property
    def messages(self) -> list[Json]:
        """The items as messages of a chat."""
        return messages_of(self.items)

    def with_items(self, items: Sequence[Json]) -> Conversation:
        """Returns the conversation with more items. Items that it has already are not added."""
        known = {item["id"] for item in self.items}
        return replace(self, items=[*self.items, *(i for i in items if i["id"] not in known)])

    def without(self, item_id: str) -> Conversation:
        """Returns the conversation without an item. Raises ApiError (404) if it has none."""
        self.item(item_id)
        return replace(self, items=[item for item in self.items if item["id"] != item_id])

    def item(self, item_id: str) -> Json:
        """Returns an item. Raises ApiError (404) if the conversation has none of this id."""
        for item in self.items:
            if item["id"] == item_id:
                return item
        message = f"Item with id {shown(item_id)} not found in this conversation."
        raise ApiError(404, message, param="item_id", code="item_not_found")

    def encoded(self) -> bytes:
        """Returns the body of its document. Raises ApiError if the items are too many."""
        # orjson writes no integer above 64 bits.
        body = json.dumps({"fields": self.fields, "items": self.items}).encode()
        if len(body) > _MOST_BYTES:
            wrong = f"the conversation would have {len(body)} bytes; {_MOST_BYTES} are allowed."
            raise bad_field("items", wrong)
        return body


class Conversations:
    """Finds and keeps conversations. Methods raise ApiError (503) if the store is unreachable."""

    def __init__(self, documents: DocumentStore, ttl_s: float) -> None:
        """Conversations live for `ttl_s` from their creation."""
        self._documents = documents
        self._ttl_s = ttl_s

    async def create(self, tenant: str, items: Sequence[Json], metadata: Json) -> Conversation:
        conversation_id = new_conversation_id()
        fields = {
            "id": conversation_id,
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": metadata,
        }
        made = Conversation(fields=fields, items=items)
        with reachable("conversations"):
            await self._documents.create(
                conversation_id,
                tenant=tenant,
                source=b"",
                change=Change(body=made.encoded()),
                ttl_s=self._ttl_s,
            )
        return made

    async def find(
        self, conversation_id: str, tenant: str, param: str = "conversation_id"
    ) -> Conversation:
        """Raises ApiError (404), which names `param`, unless the tenant has this conversation."""
        return _read(await self._get(conversation_id, tenant, param))

    async def change(
        self, conversation_id: str, tenant: str, edit: Callable[[Conversation], Conversation]
    ) -> Conversation:
        """Returns the conversation as `edit` made it of the newest. Raises ApiError as `find`.

        Raises ApiError (409) if others change it all the time.
        """
        for _ in range(_TRIES):
            document = await self._get(conversation_id, tenant, "conversation_id")
            changed = edit(_read(document))
            change = Change(body=changed.encoded(), expected=document.body)
            with reachable("conversations"):
                if await self._documents.update(conversation_id, change):
                    return changed
        message = "Other requests change this conversation; try again."
        raise ApiError(409, message, param="conversation_id", code="conversation_locked")

    async def keep(self, conversation_id: str, tenant: str, items: Sequence[Json]) -> None:
        """Adds the items of a complete response. If that fails, its client has it all the same.

        Raises no ApiError.
        """
        try:
            await self.change(conversation_id, tenant, lambda found: found.with_items(items))
        except ApiError as error:
            log.warning("conversation %s lacks a response: %s", conversation_id, error)

    async def delete(self, conversation_id: str, tenant: str) -> None:
        """Removes a conversation. Raises ApiError as `find`."""
        await self._get(conversation_id, tenant, "conversation_id")
        with reachable("conversations"):
            await self._documents.delete(conversation_id)

    async def _get(self, conversation_id: str, tenant: str, param: str) -> Document:
        found = None
        if is_conversation_id(conversation_id):
            with reachable("conversations"):
                found = await self._documents.get(conversation_id)
        if found is None or found.tenant != tenant:
            message = f"Conversation with id {shown(conversation_id)} not found."
            raise ApiError(404, message, param=param, code="conversation_not_found")
        return found


def _read(document: Document) -> Conversation:
    return Conversation(**orjson.loads(document.body))
