"""The fields of request bodies in OpenAI's API, in Anthropic's and in vLLM, by endpoint.

OpenAI's and Anthropic's are read from the types of their Python clients, so a newer client shows
new fields. vLLM's
are those of its protocol modules in September 2026; requests to vLLM may have any other field.
"""

from __future__ import annotations

from anthropic.types import message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = "/v1/messages"

#: Fields of Anthropic's API that the types of its client no longer have.
_SAMPLING = frozenset({"temperature", "top_k", "top_p"})


def client_fields() -> dict[str, frozenset[str]]:
    """Returns the fields that OpenAI's and Anthropic's Python clients send, by path."""
    return {
        CHAT: _fields_of(chat_create_params.CompletionCreateParamsStreaming),
        COMPLETIONS: _fields_of(completion_create_params.CompletionCreateParamsStreaming),
        RESPONSES: _fields_of(response_create_params.ResponseCreateParamsStreaming),
        MESSAGES: _fields_of(message_create_params.MessageCreateParamsStreaming) | _SAMPLING,
        EMBEDDINGS: _fields_of(embedding_create_params.EmbeddingCreateParams),
    }


def _fields_of(params: type) -> frozenset[str]:
    return frozenset(params.__annotations__)


_GENERATING = """
    allowed_token_ids bad_words cache_salt ec_transfer_params frequency_penalty ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids
    logprobs
    max_tokens min_p min_tokens model n presence_penalty priority prompt_logprobs
    repetition_detection repetition_penalty request_id response_format return_mm_kwargs
    return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start
    seed
    session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream
    stream_interval stream_options structured_outputs temperature thinking_token_budget top_k top_p
    truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
"""
_VLLM = {
    CHAT: f"""{_GENERATING}
        add_generation_prompt add_special_tokens chat_template chat_template_kwargs
        continue_final_message documents echo include_reasoning max_completion_tokens
        media_io_kwargs
        messages mm_processor_kwargs parallel_tool_calls reasoning_effort return_prompt_text
        tool_choice tools top_logprobs
    """,
    COMPLETIONS: f"{_GENERATING} add_special_tokens echo prompt prompt_embeds suffix",
    RESPONSES: """
        background cache_salt enable_response_messages ignore_eos include include_stop_str_in_output
        input instructions logit_bias max_output_tokens max_tool_calls metadata mm_processor_kwargs
        model parallel_tool_calls previous_input_messages previous_response previous_response_id
        priority prompt reasoning repetition_penalty request_id seed service_tier
        skip_special_tokens
        stop store stream structured_outputs temperature text tool_choice tools top_k top_logprobs
        top_p truncation user vllm_xargs
    """,
    MESSAGES: """
        chat_template_kwargs kv_transfer_params max_tokens messages metadata model output_config
        stop_sequences stream system temperature tool_choice tools top_k top_p
    """,
    EMBEDDINGS: """
        add_special_tokens cache_salt dimensions embed_dtype encoding_format endianness input
        mm_processor_kwargs model padding priority request_id truncate_prompt_tokens truncation_side
        use_activation user
    """,
}


def vllm_fields() -> dict[str, frozenset[str]]:
    """Returns the fields of vLLM's request bodies, by path."""
    return {path: frozenset(names.split()) for path, names in _VLLM.items()}
