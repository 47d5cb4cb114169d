"""The models of request bodies: OpenAI's fields, common extensions, and fields of other servers.

A field that would change the answer and is not supported is refused by name; a field without an
effect on the answer's tokens is ignored, as in vLLM. docs/reference/parameters.md has the reasons.
`validation` adds the fields that have limits of one server.
"""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import Field, with_config
from typing_extensions import TypedDict

from millrace.proxy.request.models.constraints import ConstraintFields
from millrace.proxy.request.models.fields import (
    STRICT,
    AnyObject,
    Ignored,
    OneOf,
    Unsupported,
    Within,
)
from millrace.proxy.request.models.messages import Messages
from millrace.proxy.request.models.sampling import SamplingFields
from millrace.proxy.request.models.tools import (
    CHOICES,
    Choice,
    LegacyChoice,
    LegacyFunctions,
    Tools,
)

_NOT_BUILT = "not built"
_TEXT_ONLY = "text in, text out"
_OF_VLLM = "vLLM's own disaggregation and plug-ins"


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


class GenerateBody(SamplingFields, ConstraintFields, total=False):
    """The fields of both completion endpoints: first served, then ignored, then refused fields."""

    truncation_side: Annotated[
        Annotated[str, OneOf("left", "right")] | None,
        Field(description="Where truncate_prompt_tokens cuts. Default: left, so the end is kept."),
    ]
    add_special_tokens: Annotated[
        bool | None, Field(description="Add the tokenizer's special tokens to the prompt.")
    ]
    return_token_ids: Annotated[
        bool | None, Field(description="Add token_ids to every choice or chunk.")
    ]
    return_tokens_as_token_ids: Annotated[
        bool | None, Field(description="Log probabilities show tokens as `token_id:N`.")
    ]
    cache_prompt: Annotated[
        bool | None,
        Field(
            description="Default: true. Reuse the KV of a prefix of earlier prompts; "
            "keep this prompt's KV.",
        ),
    ]
    use_beam_search: Annotated[
        bool | None, Field(description="Search the n likeliest answers, the likeliest first.")
    ]
    length_penalty: Annotated[
        Annotated[float, Within(-16, 16)] | None,
        Field(
            description="With use_beam_search: the power of the length by which log probabilities "
            "are divided. Default: 1."
        ),
    ]
    stream: Annotated[bool | None, Field(description="Answer as server-sent events.")]
    stream_options: Annotated[
        StreamOptions | None, Field(description="What a stream shows beside the answer.")
    ]

    user: Ignored[str]
    request_id: Ignored[str]
    rid: Ignored[str]
    session_id: Ignored[str]
    spaces_between_special_tokens: Ignored[bool]
    stream_interval: Ignored[Annotated[int, Within(1, 2**31 - 1)]]

    ec_transfer_params: Annotated[Any, Unsupported({}, why=_OF_VLLM)]
    kv_transfer_params: Annotated[Any, Unsupported({}, why=_OF_VLLM)]
    logprob_token_ids: Annotated[Any, Unsupported(why=_NOT_BUILT)]
    lora_path: Annotated[Any, Unsupported(why=_NOT_BUILT)]
    custom_logit_processor: Annotated[Any, Unsupported(why="code of clients does not run")]
    return_hidden_states: Annotated[Any, Unsupported(False, why="/v1/embeddings has vectors")]
    stop_regex: Annotated[Any, Unsupported([], why=_NOT_BUILT)]
    repetition_detection: Annotated[Any, Unsupported(why=_NOT_BUILT)]
    return_mm_kwargs: Annotated[Any, Unsupported(False, True, why=_TEXT_ONLY)]
    return_token_offsets: Annotated[Any, Unsupported(False, why=_NOT_BUILT)]
    routed_experts_prompt_start: Annotated[Any, Unsupported(0, why=_NOT_BUILT)]
    vllm_xargs: Annotated[Any, Unsupported({}, why=_OF_VLLM)]
    watermarking: Annotated[Any, Unsupported(False, why=_NOT_BUILT)]


class ChatBody(GenerateBody, total=False):
    """The body of /v1/chat/completions."""

    messages: Required[Annotated[Messages, Field(description="The conversation so far.")]]
    logprobs: Annotated[bool | None, Field(description="Show log probabilities of the tokens.")]
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
    tools: Annotated[Tools | None, Field(description="Tools that the assistant may call.")]
    tool_choice: Annotated[Choice | None, Field(description=CHOICES)]
    parallel_tool_calls: Annotated[
        bool | None, Field(description="Default: true. False: only the first call is shown.")
    ]
    functions: Annotated[LegacyFunctions | None, Field(description="Older form of tools.")]
    function_call: Annotated[LegacyChoice | None, Field(description="Older form of tool_choice.")]
    include_reasoning: Annotated[
        bool | None, Field(description="Default: true. False: reasoning is left out.")
    ]
    modalities: Annotated[
        Annotated[list[Annotated[str, OneOf("text")]], Field(min_length=1, fail_fast=True)] | None,
        Field(description="Only `text`."),
    ]

    metadata: Ignored[AnyObject]
    prediction: Ignored[AnyObject]
    prompt_cache_key: Ignored[str]
    prompt_cache_options: Ignored[AnyObject]
    prompt_cache_retention: Ignored[str]
    safety_identifier: Ignored[str]
    service_tier: Ignored[Annotated[str, OneOf("auto", "default", "flex", "scale", "priority")]]
    store: Ignored[bool]
    verbosity: Ignored[Annotated[str, OneOf("low", "medium", "high")]]

    audio: Annotated[Any, Unsupported(why=_TEXT_ONLY)]
    chat_template: Annotated[Any, Unsupported(why="the model's own template is used")]
    documents: Annotated[Any, Unsupported([], why=_NOT_BUILT)]
    echo: Annotated[Any, Unsupported(False, why="only completions echo")]
    media_io_kwargs: Annotated[Any, Unsupported({}, why=_TEXT_ONLY)]
    mm_processor_kwargs: Annotated[Any, Unsupported({}, why=_TEXT_ONLY)]
    moderation: Annotated[Any, Unsupported(why=_NOT_BUILT)]
    separate_reasoning: Annotated[Any, Unsupported(True, why="proxy.reasoning_parser=none does it")]
    stream_reasoning: Annotated[Any, Unsupported(True, why="include_reasoning=false leaves it out")]
    return_prompt_text: Annotated[Any, Unsupported(False, why=_NOT_BUILT)]
    web_search_options: Annotated[Any, Unsupported(why=_NOT_BUILT)]


class CompletionBody(GenerateBody, total=False):
    """The body of /v1/completions."""

    echo: Annotated[bool | None, Field(description="Echo the prompt before the completion.")]

    prompt_embeds: Annotated[Any, Unsupported(why=_TEXT_ONLY)]
    suffix: Annotated[Any, Unsupported("", why=_NOT_BUILT)]


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
