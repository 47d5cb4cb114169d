"""Lists fields that clients of OpenAI's API and of vLLM send and Millrace does not serve.

A field without an effect on the answer's tokens is ignored, as in vLLM. A field that would change
the answer is refused by name, except for values without an effect. docs/reference/api.md gives the
reasons.
"""

from __future__ import annotations

from millrace.proxy.request.fields import (
    Boolean,
    Ignored,
    Integer,
    Kind,
    ListOf,
    Number,
    OneOf,
    String,
    Unsupported,
)
from millrace.proxy.request.free_form import AnyObject

_TIERS = ("auto", "default", "flex", "scale", "priority")

#: Fields of both endpoints.
SHARED: dict[str, Kind] = {
    "user": Ignored(String()),
    "request_id": Ignored(String()),
    "session_id": Ignored(String()),
    "length_penalty": Ignored(Number(-1e9, 1e9)),
    "spaces_between_special_tokens": Ignored(Boolean()),
    "stream_interval": Ignored(Integer(1, 2**31 - 1)),
    "use_beam_search": Unsupported((False,)),
    "allowed_token_ids": Unsupported(),
    "bad_words": Unsupported(([],)),
    "kv_transfer_params": Unsupported(),
    "logprob_token_ids": Unsupported(),
    "priority": Unsupported((0,)),
    "prompt_logprobs": Unsupported(),
    "repetition_detection": Unsupported(),
    "return_tokens_as_token_ids": Unsupported((False,)),
    "structured_outputs": Unsupported(),
    "thinking_token_budget": Unsupported((-1,)),
    "truncate_prompt_tokens": Unsupported(),
    "vllm_xargs": Unsupported(({},)),
}

CHAT: dict[str, Kind] = {
    "include_reasoning": Ignored(Boolean()),
    "metadata": Ignored(AnyObject()),
    "modalities": ListOf(OneOf(("text",)), 1),
    "parallel_tool_calls": Ignored(Boolean()),
    "prompt_cache_key": Ignored(String()),
    "prompt_cache_options": Ignored(AnyObject()),
    "prompt_cache_retention": Ignored(String()),
    "safety_identifier": Ignored(String()),
    "service_tier": Ignored(OneOf(_TIERS)),
    "store": Ignored(Boolean()),
    "verbosity": Ignored(OneOf(("low", "medium", "high"))),
    "audio": Unsupported(),
    "chat_template": Unsupported(),
    "documents": Unsupported(([],)),
    "echo": Unsupported((False,)),
    "function_call": Unsupported(("none", "auto")),
    "functions": Unsupported(([],)),
    "mm_processor_kwargs": Unsupported(({},)),
    "prediction": Unsupported(),
    "tool_choice": Unsupported(("none", "auto")),
    "web_search_options": Unsupported(),
}

COMPLETION: dict[str, Kind] = {
    "prompt_embeds": Unsupported(),
    "response_format": Unsupported(({"type": "text"},)),
    "suffix": Unsupported(("",)),
}
