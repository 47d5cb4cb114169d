"""The models of the bodies of /v1/messages: Anthropic's fields, and some of chat's extensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import Field, with_config
from typing_extensions import TypedDict

from millrace.proxy.request.models.constraints import StructuredOutputs
from millrace.proxy.request.models.custom_tools import ToolName
from millrace.proxy.request.models.fields import (
    STRICT,
    AnyObject,
    Ignored,
    OneOf,
    OneType,
    Unsupported,
    Within,
    of_types,
    text_or_array,
)
from millrace.proxy.request.models.sampling import SamplingFields, Stops
from millrace.proxy.request.models.tools import Parameters

_NOT_BUILT = "not built"
_BLOCK_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


@with_config(STRICT)
class TextBlock(TypedDict):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: NotRequired[Ignored[AnyObject]]
    citations: NotRequired[Ignored[list[AnyObject]]]


@with_config(STRICT)
class ThinkingBlock(TypedDict):
    """The reasoning of an earlier answer. Chat templates get it as reasoning_content."""

    type: Literal["thinking"]
    thinking: str
    signature: NotRequired[Ignored[str]]


@with_config(STRICT)
class RedactedThinkingBlock(TypedDict):
    """Reasoning that only Anthropic's servers can read."""

    type: Literal["redacted_thinking"]
    data: Ignored[str]


@with_config(STRICT)
class ToolUseBlock(TypedDict):
    """A call of a tool by the assistant."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: AnyObject
    cache_control: NotRequired[Ignored[AnyObject]]
    caller: NotRequired[Ignored[AnyObject]]
    toolset_name: NotRequired[Annotated[Any, Unsupported(why=_NOT_BUILT)]]


def _kind_of_block(block: object) -> str | None:
    return str(block.get("type")) if isinstance(block, dict) else None


_TextOnly = Annotated[
    Any,
    OneType(_kind_of_block, "an object", text=TextBlock),
    of_types(("text",), "the type of a block here"),
]
_Texts = Annotated[
    Any,
    text_or_array(Annotated[list[_TextOnly], Field(fail_fast=True)], "text blocks"),
]


@with_config(STRICT)
class ToolResultBlock(TypedDict):
    """The result of a called tool."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: NotRequired[_Texts | None]
    is_error: NotRequired[
        Annotated[
            bool | None,
            Field(description="True: the text of the result begins with `Error: ` in the prompt."),
        ]
    ]
    cache_control: NotRequired[Ignored[AnyObject]]
    toolset_name: NotRequired[Annotated[Any, Unsupported(why=_NOT_BUILT)]]


_Block = Annotated[
    Any,
    OneType(
        _kind_of_block,
        "an object",
        "type",
        text=TextBlock,
        thinking=ThinkingBlock,
        redacted_thinking=RedactedThinkingBlock,
        tool_use=ToolUseBlock,
        tool_result=ToolResultBlock,
    ),
    of_types(_BLOCK_TYPES, "the type of a block"),
]


@with_config(STRICT)
class TurnOfMessages(TypedDict):
    """A message of the conversation."""

    role: Annotated[str, OneOf("user", "assistant", "system")]
    content: Annotated[
        Any,
        text_or_array(Annotated[list[_Block], Field(min_length=1, fail_fast=True)], "blocks"),
    ]


@with_config(STRICT)
class ClientTool(TypedDict, total=False):
    """A tool of the client, which the assistant may call."""

    type: Annotated[str, OneOf("custom", why=" Tools that the server runs are not built.")] | None
    name: Required[ToolName]
    description: str | None
    input_schema: Required[Parameters]
    strict: Annotated[
        bool | None, Field(description="Holds if a call is forced; no effect if not.")
    ]
    cache_control: Ignored[AnyObject]
    eager_input_streaming: Ignored[bool]
    input_examples: Ignored[list[AnyObject]]
    allowed_callers: Annotated[Any, Unsupported(["direct"], why=_NOT_BUILT)]
    defer_loading: Annotated[Any, Unsupported(False, why=_NOT_BUILT)]


@with_config(STRICT)
class ClientToolChoice(TypedDict, total=False):
    """The choice between the tools. `name` goes with the type tool, and only there."""

    type: Required[Annotated[str, OneOf("auto", "any", "tool", "none")]]
    name: ToolName | None
    disable_parallel_tool_use: bool | None


@with_config(STRICT)
class Thinking(TypedDict, total=False):
    """Whether the model reasons. `budget_tokens` goes with the type enabled, and only there."""

    type: Required[Annotated[str, OneOf("enabled", "disabled", "adaptive")]]
    budget_tokens: Annotated[int, Within(1, 2**31 - 1)] | None
    display: Annotated[str, OneOf("summarized", "omitted")] | None


@with_config(STRICT)
class OutputFormat(TypedDict):
    """The JSON schema of the answer."""

    type: Annotated[str, OneOf("json_schema")]
    schema: AnyObject


@with_config(STRICT)
class OutputConfig(TypedDict, total=False):
    """The form of the answer."""

    effort: Annotated[
        Annotated[str, OneOf("low", "medium", "high", "xhigh", "max")] | None,
        Field(description="Passed to the chat template as `reasoning_effort`."),
    ]
    format: OutputFormat | None


class CountBody(TypedDict, total=False):
    """The body of /v1/messages/count_tokens: what makes the prompt."""

    messages: Required[
        Annotated[
            list[TurnOfMessages],
            Field(
                min_length=1,
                fail_fast=True,
                description="The conversation so far. With `is_error` the text of a tool's result "
                "begins with `Error: ` in the prompt.",
            ),
        ]
    ]
    system: Annotated[_Texts | None, Field(description="A system message before the others.")]
    tools: Annotated[
        Annotated[list[ClientTool], Field(max_length=1024, fail_fast=True)] | None,
        Field(description="Tools of the client that the assistant may call."),
    ]
    tool_choice: Annotated[
        ClientToolChoice | None, Field(description="Which tools the assistant calls.")
    ]
    thinking: Annotated[
        Thinking | None,
        Field(description="`budget_tokens`: after so many tokens of reasoning its end is forced."),
    ]
    output_config: Annotated[
        OutputConfig | None, Field(description="`format`: JSON of a schema; `effort`.")
    ]
    chat_template_kwargs: Annotated[
        AnyObject | None, Field(description="Further arguments of the chat template.")
    ]

    cache_control: Ignored[AnyObject]
    user_profile_id: Ignored[str]
    workspace_id: Ignored[str]

    context_management: Annotated[
        Any,
        Unsupported(
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            why=_NOT_BUILT,
        ),
    ]
    mcp_servers: Annotated[Any, Unsupported([], why=_NOT_BUILT)]
    speed: Annotated[Any, Unsupported("standard", why=_NOT_BUILT)]


class MessageBody(CountBody, SamplingFields, total=False):
    """The body of /v1/messages: first served, then ignored, then refused fields."""

    stop_sequences: Annotated[
        Stops | None, Field(description="Anthropic's name of stop: up to 16 texts.")
    ]
    stream: Annotated[bool | None, Field(description="Answer as server-sent events.")]
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="vLLM's form of output_config.format.")
    ]

    diagnostics: Ignored[AnyObject]
    metadata: Ignored[AnyObject]
    service_tier: Ignored[Annotated[str, OneOf("auto", "standard_only")]]

    container: Annotated[Any, Unsupported(why=_NOT_BUILT)]
    inference_geo: Annotated[Any, Unsupported(why=_NOT_BUILT)]
    kv_transfer_params: Annotated[Any, Unsupported({}, why="vLLM's own disaggregation")]
