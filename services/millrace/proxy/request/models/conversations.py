"""The models of the bodies of /v1/conversations."""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from millrace.proxy.request.models.fields import STRICT
from millrace.proxy.request.models.responses import Metadata, ResponseItem

_Items = Annotated[list[ResponseItem], Field(max_length=20, fail_fast=True)]


@with_config(STRICT)
class ConversationRequest(TypedDict, total=False):
    """The body of POST /v1/conversations."""

    items: Annotated[_Items | None, Field(description="The first items, at most 20.")]
    metadata: Metadata | None


@with_config(STRICT)
class ConversationUpdate(TypedDict, total=False):
    """The body of POST /v1/conversations/{conversation_id}. Null removes all pairs."""

    metadata: Required[Metadata | None]


@with_config(STRICT)
class NewItems(TypedDict, total=False):
    """The body of POST /v1/conversations/{conversation_id}/items."""

    items: Required[Annotated[_Items, Field(min_length=1, description="At most 20.")]]


CONVERSATION: TypeAdapter[Any] = TypeAdapter(ConversationRequest)
CONVERSATION_UPDATE: TypeAdapter[Any] = TypeAdapter(ConversationUpdate)
NEW_ITEMS: TypeAdapter[Any] = TypeAdapter(NewItems)
