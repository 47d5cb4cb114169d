"""/v1/conversations: creates, shows, changes and deletes conversations and their items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from millrace.proxy.conversations import Conversation
from millrace.proxy.http.asgi import Receive, Scope, Send, receive_body, send_document
from millrace.proxy.http.endpoints.generate import Services
from millrace.proxy.http.query import list_of, page_of, query_of
from millrace.proxy.request.item_ids import new_item_id
from millrace.proxy.request.models.conversations import (
    CONVERSATION,
    CONVERSATION_UPDATE,
    NEW_ITEMS,
)
from millrace.proxy.request.reading import read_body
from millrace.proxy.request.responses import shown_item

Json = dict[str, Any]

CONVERSATIONS_PATH = "/v1/conversations"
CONVERSATION_PATH = CONVERSATIONS_PATH + "/{conversation_id}"
ITEMS_PATH = CONVERSATION_PATH + "/items"
ITEM_PATH = ITEMS_PATH + "/{item_id}"


class ConversationEndpoints:
    """Answers the requests about conversations."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._conversations = services.conversations

    async def create(self, scope: Scope, receive: Receive, send: Send) -> int:
        fields = read_body(CONVERSATION, await self._body(scope, receive))
        tenant = self._services.tenants.of(scope)
        items = await self._items(fields.get("items", ()), tenant)
        made = await self._conversations.create(tenant, items, fields.get("metadata", {}))
        return await send_document(send, made.fields)

    async def one(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answers GET, POST and DELETE of one conversation."""
        conversation_id, tenant = self._named(scope)
        if scope["method"] == "DELETE":
            await self._conversations.delete(conversation_id, tenant)
            deleted = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
            return await send_document(send, deleted)
        if scope["method"] == "POST":
            fields = read_body(CONVERSATION_UPDATE, await self._body(scope, receive))
            metadata = fields.get("metadata", {})

            def edit(found: Conversation) -> Conversation:
                return replace(found, fields=found.fields | {"metadata": metadata})

            found = await self._conversations.change(conversation_id, tenant, edit)
        else:
            found = await self._conversations.find(conversation_id, tenant)
        return await send_document(send, found.fields)

    async def items(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answers GET and POST of the items of a conversation."""
        conversation_id, tenant = self._named(scope)
        if scope["method"] != "POST":
            found = await self._conversations.find(conversation_id, tenant)
            return await send_document(send, page_of(found.items, query_of(scope)))
        fields = read_body(NEW_ITEMS, await self._body(scope, receive))
        items = await self._items(fields["items"], tenant)
        await self._conversations.change(
            conversation_id, tenant, lambda found: found.with_items(items)
        )
        return await send_document(send, list_of(items, has_more=False))

    async def item(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Answers GET and DELETE of one item."""
        conversation_id, tenant = self._named(scope)
        item_id = scope["path_params"]["item_id"]
        if scope["method"] == "DELETE":
            changed = await self._conversations.change(
                conversation_id, tenant, lambda found: found.without(item_id)
            )
            return await send_document(send, changed.fields)
        found = await self._conversations.find(conversation_id, tenant)
        return await send_document(send, found.item(item_id))

    async def _items(self, given: Sequence[Json], tenant: str) -> list[Json]:
        """Returns the items of a body as the API shows them, with those that references name."""
        items = [shown_item(item, new_item_id) for item in given]
        return await self._services.responses.referenced(items, tenant, "items")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        return await receive_body(scope, receive, self._services.config.proxy.max_body_bytes)

    def _named(self, scope: Scope) -> tuple[str, str]:
        """Returns the id of the conversation and the tenant."""
        return scope["path_params"]["conversation_id"], self._services.tenants.of(scope)
