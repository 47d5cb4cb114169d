"""Conversations in a store: their life, and changes that meet."""

from __future__ import annotations

import pytest

from millrace.proxy.conversations import Conversation, Conversations
from millrace.proxy.errors import ApiError
from millrace.state.documents import MemoryDocuments
from millrace.state.store import StoreError

TENANT = "acme"


def item(name):
    return {"type": "message", "id": name, "role": "user", "content": []}


def names(conversation):
    return [found["id"] for found in conversation.items]


class Meeting(MemoryDocuments):
    """Documents that others change before each of the next `left` updates."""

    left = 0

    async def update(self, document_id, change):
        if self.left:
            self.left -= 1
            other = Conversations(self, 60.0)
            left, self.left = self.left, 0
            add = [item(f"other{left}")]
            await other.change(document_id, TENANT, lambda found: found.with_items(add))
            self.left = left
        return await super().update(document_id, change)


class Unreachable(MemoryDocuments):
    """Documents whose store does not answer."""

    async def get(self, document_id):
        raise StoreError("no answer")


async def test_a_conversation_lives_from_its_creation():
    now = [0.0]
    conversations = Conversations(MemoryDocuments(clock=lambda: now[0]), 60.0)
    made = await conversations.create(TENANT, [item("a")], {})
    now[0] = 59.0
    await conversations.keep(made.fields["id"], TENANT, [item("b")])
    assert names(await conversations.find(made.fields["id"], TENANT)) == ["a", "b"]
    now[0] = 61.0
    with pytest.raises(ApiError) as raised:
        await conversations.find(made.fields["id"], TENANT)
    assert (raised.value.status, raised.value.code) == (404, "conversation_not_found")


async def test_changes_that_meet_are_all_made():
    documents = Meeting()
    conversations = Conversations(documents, 60.0)
    made = (await conversations.create(TENANT, [item("a")], {})).fields["id"]
    documents.left = 3
    changed = await conversations.change(
        made, TENANT, lambda found: found.with_items([item("mine")])
    )
    assert names(changed) == ["a", "other2", "other1", "other0", "mine"]
    assert await conversations.find(made, TENANT) == changed


async def test_a_conversation_that_changes_all_the_time_is_locked():
    documents = Meeting()
    conversations = Conversations(documents, 60.0)
    made = (await conversations.create(TENANT, [], {})).fields["id"]
    documents.left = 1000
    with pytest.raises(ApiError) as raised:
        await conversations.change(made, TENANT, lambda found: found.with_items([item("mine")]))
    assert (raised.value.status, raised.value.code) == (409, "conversation_locked")


async def test_the_size_of_a_conversation_is_limited():
    conversations = Conversations(MemoryDocuments(), 60.0)
    made = (await conversations.create(TENANT, [], {})).fields["id"]
    long = {**item("a"), "content": [{"type": "input_text", "text": "x" * (9 << 20)}]}
    await conversations.change(made, TENANT, lambda found: found.with_items([long]))
    with pytest.raises(ApiError) as raised:
        await conversations.change(
            made, TENANT, lambda found: found.with_items([{**long, "id": "b"}])
        )
    assert (raised.value.status, raised.value.param) == (400, "items")
    assert str(16 << 20) in raised.value.message
    assert names(await conversations.find(made, TENANT)) == ["a"]


async def test_items_that_are_there_are_not_added_again():
    """An update may have been made though its connection broke."""
    found = Conversation(fields={}, items=[item("a")]).with_items([item("a"), item("b")])
    assert names(found) == ["a", "b"]


async def test_a_turn_is_lost_where_the_store_is_and_its_client_is_not_told(caplog):
    conversations = Conversations(Unreachable(), 60.0)
    with pytest.raises(ApiError) as raised:
        await conversations.find("conv_1", TENANT)
    assert raised.value.status == 503
    await conversations.keep("conv_1", TENANT, [item("a")])
    assert "conversation conv_1 lacks a response" in caplog.text
