"""The model of the body of /v1/responses: OpenAI's fields, and some of chat's extensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import AfterValidator, BeforeValidator, Field, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from millrace.proxy.errors import shown
from millrace.proxy.request.models.constraints import StructuredOutputs
from millrace.proxy.request.models.fields import (
    STRICT,
    AnyObject,
    Ignored,
    JsonText,
    OneOf,
    OneType,
    Unsupported,
    Within,
    kind_of_part,
    of_types,
    text_or_array,
    text_or_object,
)
from millrace.proxy.request.models.sampling import SamplingFields
from millrace.proxy.request.models.tools import CHOICES, ResponseChoice, ResponseTools

_NOT_BUILT = "not built"
_Text = Annotated[str, Field(min_length=1)]

_PART_TYPES = ("input_text", "output_text", "text", "refusal")
_ITEM_TYPES = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "item_reference",
)
#: The value of `include` that shows log probabilities.
LOGPROBS = "message.output_text.logprobs"
#: Those that OpenAI's API knows. Answers have nothing of what the others show: they change nothing.
_INCLUDED = (
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
#: A summary is a reasoning model's second text: answers have the reasoning itself.
_Summary = Ignored[Annotated[str, OneOf("auto", "concise", "detailed")]]


@with_config(STRICT)
class ResponseTextPart(TypedDict):
    """A part of an item's content."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: NotRequired[Ignored[list[AnyObject]]]
    logprobs: NotRequired[Ignored[list[AnyObject]]]
    prompt_cache_breakpoint: NotRequired[Ignored[AnyObject]]


@with_config(STRICT)
class ResponseRefusalPart(TypedDict):
    """A part of an assistant's content: the model refused to answer."""

    type: Literal["refusal"]
    refusal: str


_Part = Annotated[
    Any,
    OneType(
        kind_of_part,
        "an object",
        text=ResponseTextPart,
        refusal=ResponseRefusalPart,
    ),
    of_types(_PART_TYPES, "the type of a content part"),
]
_Content = Annotated[
    Any,
    text_or_array(Annotated[list[_Part], Field(min_length=1, fail_fast=True)], "content parts"),
]


@with_config(STRICT)
class MessageItem(TypedDict):
    """A message."""

    type: NotRequired[Literal["message"]]
    role: Annotated[str, OneOf("user", "assistant", "system", "developer")]
    content: _Content
    id: NotRequired[str | None]
    status: NotRequired[str | None]
    phase: NotRequired[Ignored[str]]


@with_config(STRICT)
class _Direct(TypedDict):
    """Who called: the model itself."""

    type: Annotated[str, OneOf("direct")]


class _OfCall(TypedDict):
    """What calls of tools and their outputs have in common."""

    call_id: _Text
    id: NotRequired[str | None]
    status: NotRequired[str | None]
    caller: NotRequired[Ignored[_Direct]]
    created_by: NotRequired[Ignored[str]]


@with_config(STRICT)
class CallItem(_OfCall):
    """A call of a function by the assistant."""

    type: Literal["function_call"]
    name: _Text
    arguments: JsonText
    namespace: NotRequired[Annotated[Any, Unsupported(why=_NOT_BUILT)]]


@with_config(STRICT)
class CallOutputItem(_OfCall):
    """The output of a called function."""

    type: Literal["function_call_output"]
    output: _Content
    name: NotRequired[Ignored[str]]
    namespace: NotRequired[Annotated[Any, Unsupported(why=_NOT_BUILT)]]


@with_config(STRICT)
class CustomCallItem(_OfCall):
    """A call of a custom tool by the assistant."""

    type: Literal["custom_tool_call"]
    name: _Text
    input: str
    namespace: NotRequired[Annotated[Any, Unsupported(why=_NOT_BUILT)]]


@with_config(STRICT)
class CustomOutputItem(_OfCall):
    """The output of a called custom tool."""

    type: Literal["custom_tool_call_output"]
    output: _Content
    name: NotRequired[Ignored[str]]


@with_config(STRICT)
class ReasoningItem(TypedDict):
    """The reasoning of an earlier answer. Chat templates do not show it again."""

    type: Literal["reasoning"]
    summary: list[AnyObject]
    content: NotRequired[list[AnyObject] | None]
    encrypted_content: NotRequired[str | None]
    id: NotRequired[str | None]
    status: NotRequired[str | None]


@with_config(STRICT)
class ItemReference(TypedDict):
    """Stands for an item of a stored response, of its input or its output."""

    id: _Text
    type: NotRequired[Literal["item_reference"]]


def _kind_of_item(item: object) -> str | None:
    if not isinstance(item, dict):
        return None
    return str(item.get("type", "item_reference" if item.keys() == {"id"} else "message"))


def _without_nulls(item: object) -> object:
    """Null is the same as absent: clients send back their objects with the fields of other servers.

    Fields that newer clients know than this server are among these.
    """
    if not isinstance(item, dict):
        return item
    return {name: value for name, value in item.items() if value is not None}


#: An item of an input or of a conversation.
ResponseItem = Annotated[
    Any,
    OneType(
        _kind_of_item,
        "an object",
        message=MessageItem,
        function_call=CallItem,
        function_call_output=CallOutputItem,
        custom_tool_call=CustomCallItem,
        custom_tool_call_output=CustomOutputItem,
        reasoning=ReasoningItem,
        item_reference=ItemReference,
    ),
    of_types(_ITEM_TYPES, "the type of an item", "message"),
    BeforeValidator(_without_nulls),
]


@with_config(STRICT)
class TextFormat(TypedDict, total=False):
    """The form of the answer. `name` and `schema` go with the type json_schema, and only there."""

    type: Required[Annotated[str, OneOf("text", "json_object", "json_schema")]]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None
    schema: AnyObject | None
    strict: Ignored[bool]
    description: Ignored[str]


@with_config(STRICT)
class TextOptions(TypedDict, total=False):
    """The form of the answer."""

    format: TextFormat | None
    verbosity: Ignored[Annotated[str, OneOf("low", "medium", "high")]]


@with_config(STRICT)
class Reasoning(TypedDict, total=False):
    """How the model reasons."""

    effort: Annotated[
        Annotated[str, Field(max_length=32)] | None,
        Field(description="Passed to the chat template."),
    ]
    summary: _Summary
    generate_summary: _Summary


@with_config(STRICT)
class ResponseStreamOptions(TypedDict, total=False):
    """What a stream shows beside the answer."""

    include_obfuscation: Ignored[bool]


def _check_metadata(pairs: dict[str, str]) -> dict[str, str]:
    if len(pairs) > 16:
        raise PydanticCustomError("invalid_value", f"must have at most 16 keys, got {len(pairs)}.")
    for key in pairs:
        if len(key) > 64:
            wrong = f"keys have at most 64 characters, got {shown(key)}."
            raise PydanticCustomError("invalid_value", wrong)
    return pairs


#: Up to 16 pairs that belong to the client.
Metadata = Annotated[
    dict[str, Annotated[str, Field(max_length=512)]], AfterValidator(_check_metadata)
]


@with_config(STRICT)
class ConversationId(TypedDict):
    """Names a conversation."""

    id: _Text


_Conversation = Annotated[
    Any, OneType(text_or_object, "a string or an object", text=_Text, object=ConversationId)
]


class ResponseBody(SamplingFields, total=False):
    """The body of /v1/responses: first served, then ignored, then refused fields."""

    input: Required[
        Annotated[
            Any,
            text_or_array(
                Annotated[list[ResponseItem], Field(min_length=1, fail_fast=True)],
                "items",
                text=_Text,
            ),
            Field(description="A text, or the conversation's items."),
        ]
    ]
    instructions: Annotated[
        str | None, Field(description="A system message before the conversation.")
    ]
    previous_response_id: Annotated[
        str | None, Field(description="Continue the conversation of a stored response.")
    ]
    conversation: Annotated[
        _Conversation | None,
        Field(description="Continue a conversation, which gets the input and the output."),
    ]
    store: Annotated[bool | None, Field(description="Default: true. Keep the response.")]
    background: Annotated[
        bool | None, Field(description="Answer at once, and generate without a client.")
    ]
    stream: Annotated[bool | None, Field(description="Answer as server-sent events.")]
    stream_options: Annotated[
        ResponseStreamOptions | None, Field(description="What a stream shows beside the answer.")
    ]
    metadata: Annotated[
        Metadata | None,
        Field(description="At most 16 pairs, returned with the response."),
    ]
    truncation: Annotated[
        Annotated[str, OneOf("disabled", "auto")] | None,
        Field(description="auto: drop the oldest messages of a conversation that is too long."),
    ]
    reasoning: Annotated[
        Reasoning | None, Field(description="`effort` is passed to the chat template.")
    ]
    include: Annotated[
        list[Annotated[str, OneOf(*_INCLUDED)]] | None,
        Field(description=f"`{LOGPROBS}`: log probabilities. Others show what no answer has."),
    ]
    text: Annotated[TextOptions | None, Field(description="`format`: JSON, or JSON of a schema.")]
    tools: Annotated[ResponseTools | None, Field(description="Tools that the assistant may call.")]
    tool_choice: Annotated[ResponseChoice | None, Field(description=CHOICES)]
    parallel_tool_calls: Annotated[
        bool | None, Field(description="Default: true. False: only the first call is shown.")
    ]
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="vLLM's form of text.format.")
    ]
    chat_template_kwargs: Annotated[
        AnyObject | None, Field(description="Further arguments of the chat template.")
    ]

    max_tool_calls: Ignored[Annotated[int, Within(1, 2**31 - 1)]]
    client_metadata: Ignored[AnyObject]
    prompt_cache_key: Ignored[str]
    prompt_cache_options: Ignored[AnyObject]
    prompt_cache_retention: Ignored[str]
    safety_identifier: Ignored[str]
    service_tier: Ignored[Annotated[str, OneOf("auto", "default", "flex", "scale", "priority")]]
    request_id: Ignored[str]
    user: Ignored[str]

    access_programs: Annotated[Any, Unsupported([], why=_NOT_BUILT)]
    context_management: Annotated[Any, Unsupported(why=_NOT_BUILT)]
    enable_response_messages: Annotated[Any, Unsupported(False, why=_NOT_BUILT)]
    image: Annotated[Any, Unsupported(why="text in, text out")]
    mm_processor_kwargs: Annotated[Any, Unsupported({}, why="text in, text out")]
    moderation: Annotated[Any, Unsupported(why=_NOT_BUILT)]
    previous_input_messages: Annotated[Any, Unsupported(why="previous_response_id does it")]
    previous_response: Annotated[Any, Unsupported(why="previous_response_id does it")]
    prompt: Annotated[Any, Unsupported(why=_NOT_BUILT)]
    vllm_xargs: Annotated[Any, Unsupported({}, why="vLLM's own plug-ins")]
