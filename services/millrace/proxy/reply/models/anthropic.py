"""The models of the answers of Anthropic's API, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from millrace.proxy.reply.models.generation import Waterfall


class AnthropicErrorBody(TypedDict):
    """What went wrong; the message names a wrong field."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """The answer of /v1/messages to a request that is refused or fails."""

    type: Literal["error"]
    error: AnthropicErrorBody


class MessageUsage(TypedDict):
    """Token counts. The tokens of the prompt are `input_tokens` and both counts of the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"]


class AnsweredMessage(TypedDict):
    """The answer of the assistant: blocks of text, thinking and calls of tools."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    millrace: NotRequired[Waterfall]


class CountedTokens(TypedDict):
    """The tokens of a prompt."""

    input_tokens: int


class ModelInfo(TypedDict):
    """A served model."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int


class ModelPage(TypedDict):
    """A page of the served models."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool


#: Every answer of Anthropic's API that the document names.
MESSAGE_ANSWERS: tuple[Any, ...] = (
    AnsweredMessage,
    AnthropicError,
    CountedTokens,
    ModelInfo,
    ModelPage,
)
