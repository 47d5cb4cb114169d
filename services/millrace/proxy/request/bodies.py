"""The models of request bodies: OpenAI's fields, common extensions, and fields of other servers.

A field that would change the answer and is not supported is refused by name; a field without an
effect on the answer's tokens is ignored, as in vLLM. docs/reference/api.md gives the reasons.
`validation` adds the fields that have limits of one server.
"""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import AfterValidator, Field, with_config
from typing_extensions import TypedDict

from millrace.proxy.request.constraints import ConstraintFields
from millrace.proxy.request.fields import (
    STRICT,
    AnyObject,
    Ignored,
    OneOf,
    OneType,
    Unsupported,
    Within,
    text_or_array,
)
from millrace.proxy.request.messages import Messages
from millrace.proxy.request.tools import Choice, LegacyChoice, LegacyFunctions, Tools

_Stop = Annotated[str, Field(min_length=1, max_length=512)]
_OneStop = Annotated[_Stop, AfterValidator(lambda text: (text,))]
_Stops = Annotated[list[_Stop], Field(max_length=16, fail_fast=True), AfterValidator(tuple)]
_Refused = Annotated[Any, Unsupported()]
_RefusedUnlessFalse = Annotated[Any, Unsupported(False)]
_RefusedUnlessEmpty = Annotated[Any, Unsupported([])]


@with_config(STRICT)
class StreamOptions(TypedDict, total=False):
    """What a stream shows beside the answer."""

    include_usage: Annotated[
        bool | None, Field(description="Send a last chunk with the usage of all choices.")
    ]
    continuous_usage_stats: Annotated[
        bool | None,
        Field(description="With include_usage: every chunk shows its choice's usage so far."),
    ]
    include_progress: Annotated[
        bool | None,
        Field(description="Send events `millrace.progress` until the first token."),
    ]
    include_obfuscation: Ignored[bool]


class GenerateBody(ConstraintFields, total=False):
    """The fields of both completion endpoints: first served, then ignored, then refused fields."""

    temperature: Annotated[float | None, Within(0, 2), Field(description="0: greedy.")]
    top_p: Annotated[float | None, Within(0, 1, above=True)]
    top_k: Annotated[int | None, Within(-1, 2**31 - 1), Field(description="0 or -1: off.")]
    min_p: Annotated[float | None, Within(0, 1)]
    presence_penalty: Annotated[float | None, Within(-2, 2)]
    frequency_penalty: Annotated[float | None, Within(-2, 2)]
    repetition_penalty: Annotated[
        float | None, Within(0, 100, above=True), Field(description="1: off.")
    ]
    seed: Annotated[
        int | None, Within(-(2**63), 2**64 - 1), Field(description="Same seed, same output.")
    ]
    ignore_eos: Annotated[
        bool | None, Field(description="Continue after the end-of-sequence token.")
    ]
    stop: (
        Annotated[
            Any,
            OneType(text_or_array, "a string or an array of strings", text=_OneStop, array=_Stops),
        ]
        | None
    )
    include_stop_str_in_output: bool | None
    skip_special_tokens: Annotated[bool | None, Field(description="Default: true.")]
    add_special_tokens: Annotated[
        bool | None, Field(description="Add the tokenizer's special tokens to the prompt.")
    ]
    return_token_ids: Annotated[
        bool | None, Field(description="Add token_ids to every choice or chunk.")
    ]
    cache_prompt: Annotated[
        bool | None,
        Field(
            description="Default: true. Reuse the KV of a prefix of earlier prompts; "
            "keep this prompt's KV.",
        ),
    ]
    cache_salt: Annotated[
        Annotated[str, Field(max_length=256)] | None,
        Field(description="Prompts share KV only if their salts are equal."),
    ]
    stream: Annotated[bool | None, Field(description="Answer as server-sent events.")]
    stream_options: StreamOptions | None

    user: Ignored[str]
    request_id: Ignored[str]
    session_id: Ignored[str]
    length_penalty: Ignored[Annotated[float, Within(-(10**9), 10**9)]]
    spaces_between_special_tokens: Ignored[bool]
    stream_interval: Ignored[Annotated[int, Within(1, 2**31 - 1)]]

    use_beam_search: _RefusedUnlessFalse
    allowed_token_ids: _Refused
    bad_words: _RefusedUnlessEmpty
    kv_transfer_params: _Refused
    logprob_token_ids: _Refused
    max_reasoning_tokens: Annotated[Any, Unsupported(-1)]
    priority: Annotated[Any, Unsupported(0)]
    repetition_detection: _Refused
    return_tokens_as_token_ids: _RefusedUnlessFalse
    thinking_token_budget: Annotated[Any, Unsupported(-1)]
    truncate_prompt_tokens: _Refused
    vllm_xargs: Annotated[Any, Unsupported({})]


class ChatBody(GenerateBody, total=False):
    """The body of /v1/chat/completions."""

    messages: Required[Messages]
    logprobs: bool | None
    add_generation_prompt: Annotated[bool | None, Field(description="Default: true.")]
    continue_final_message: Annotated[
        bool | None, Field(description="Continue the last message, not a new message.")
    ]
    chat_template_kwargs: Annotated[
        AnyObject | None, Field(description="Further arguments of the chat template.")
    ]
    reasoning_effort: Annotated[
        Annotated[str, Field(max_length=32)] | None,
        Field(description="Passed to the chat template."),
    ]
    tools: Annotated[Tools | None, Field(description="Functions that the assistant may call.")]
    tool_choice: Annotated[
        Choice | None, Field(description="'auto', 'none', 'required', or one function.")
    ]
    parallel_tool_calls: Annotated[
        bool | None, Field(description="Default: true. False: only the first call is shown.")
    ]
    functions: Annotated[LegacyFunctions | None, Field(description="Older form of tools.")]
    function_call: Annotated[LegacyChoice | None, Field(description="Older form of tool_choice.")]
    include_reasoning: Annotated[
        bool | None, Field(description="Default: true. False: reasoning is left out.")
    ]
    modalities: (
        Annotated[list[Annotated[str, OneOf("text")]], Field(min_length=1, fail_fast=True)] | None
    )

    metadata: Ignored[AnyObject]
    prompt_cache_key: Ignored[str]
    prompt_cache_options: Ignored[AnyObject]
    prompt_cache_retention: Ignored[str]
    safety_identifier: Ignored[str]
    service_tier: Ignored[Annotated[str, OneOf("auto", "default", "flex", "scale", "priority")]]
    store: Ignored[bool]
    verbosity: Ignored[Annotated[str, OneOf("low", "medium", "high")]]

    audio: _Refused
    chat_template: _Refused
    documents: _RefusedUnlessEmpty
    echo: _RefusedUnlessFalse
    mm_processor_kwargs: Annotated[Any, Unsupported({})]
    prediction: _Refused
    web_search_options: _Refused


class CompletionBody(GenerateBody, total=False):
    """The body of /v1/completions."""

    echo: Annotated[bool | None, Field(description="Echo the prompt before the completion.")]

    prompt_embeds: _Refused
    suffix: Annotated[Any, Unsupported("")]


class TokenizeBody(TypedDict, total=False):
    """The body of /tokenize: a prompt or messages."""

    prompt: Annotated[str, Field(min_length=1)] | None
    messages: Messages | None
    add_special_tokens: Annotated[
        bool | None, Field(description="Default: true for a prompt, false for messages.")
    ]
    add_generation_prompt: Annotated[bool | None, Field(description="Default: true.")]
    continue_final_message: bool | None
    chat_template_kwargs: AnyObject | None


class DetokenizeBody(TypedDict, total=False):
    """The body of /detokenize."""

    skip_special_tokens: Annotated[bool | None, Field(description="Default: false.")]
