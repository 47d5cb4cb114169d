"""The models of the answers of /v1/responses and /v1/conversations, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from millrace.proxy.reply.models.generation import Waterfall


class Response(TypedDict):
    """A response of /v1/responses. Fields that repeat the request's are not listed."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    millrace: NotRequired[Waterfall]


class DeletedResponse(TypedDict):
    """The answer to the deletion of a response."""

    id: str
    object: Literal["response"]
    deleted: bool


class _Items(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseItems(_Items):
    """A page of the input of a response."""


class Conversation(TypedDict):
    """A conversation. Its items are shown apart."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(TypedDict):
    """The answer to the deletion of a conversation."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: bool


class ConversationItems(_Items):
    """A page of the items of a conversation."""


#: Every answer that the document names.
RESPONSE_ANSWERS: tuple[Any, ...] = (
    Conversation,
    ConversationItems,
    DeletedConversation,
    DeletedResponse,
    Response,
    ResponseItems,
)
