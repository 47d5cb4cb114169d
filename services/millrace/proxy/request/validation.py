"""Checks request bodies: the fields of OpenAI's API, common extensions, and their values.

The OpenAPI document shows the same tables. Fields of other servers that clients send, and fields
that Millrace can't serve, are in `compatibility`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.proxy.errors import ApiError, bad_field, shown
from millrace.proxy.request.compatibility import CHAT, COMPLETION, SHARED
from millrace.proxy.request.fields import (
    Boolean,
    Ignored,
    Integer,
    Json,
    Kind,
    ListOf,
    LogitBias,
    Number,
    Object,
    OneOf,
    Schema,
    StopStrings,
    String,
    TokenIds,
    Unsupported,
    check_fields,
    object_schema,
    wrong_type,
)
from millrace.proxy.request.free_form import AnyObject
from millrace.proxy.request.messages import Messages
from millrace.proxy.request.options import Limits, Options, read_options

_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 512
_MAX_STOP_IDS = 1024
#: The most prompts of one completion request.
MAX_PROMPTS = 256

Prompt = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages, and how the chat template renders them."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    template_arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    conversation: Conversation
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    prompts: list[Prompt]
    options: Options
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class Prompts:
    """A string, strings, token ids or lists of token ids; `check` returns a list of prompts."""

    vocab_size: int
    context_tokens: int

    def check(self, value: Json, path: str) -> list[Prompt]:
        if isinstance(value, str):
            return [String(1).check(value, path)]
        if not isinstance(value, list):
            raise wrong_type(path, "a string or an array", value)
        if not value:
            raise bad_field(path, "must not be empty.", "empty_array")
        ids = TokenIds(self.vocab_size)
        if not isinstance(value[0], str | list):
            return [ids.check(value, path)]
        if len(value) > MAX_PROMPTS:
            raise bad_field(path, f"must have at most {MAX_PROMPTS} prompts, got {len(value)}.")
        kind: Kind = String(1) if isinstance(value[0], str) else ids
        return ListOf(kind).check(value, path)

    def schema(self) -> Schema:
        ids = TokenIds(self.vocab_size).schema()
        text = String(1).schema()
        many = [
            {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": i}
            for i in (text, ids)
        ]
        return {"anyOf": [text, *many, ids]}


@dataclass(frozen=True, slots=True)
class ModelName:
    """Any string: `check_model` answers an unknown name with a 404."""

    name: str

    def check(self, value: Json, path: str) -> str:
        return String().check(value, path)

    def schema(self) -> Schema:
        return {"type": "string", "enum": [self.name]}


class Bodies:
    """Checks the request bodies of one server, by tables that are built once from its limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        shared = _shared_fields(limits)
        self.chat: dict[str, Kind] = {**_chat_fields(limits), **shared}
        self.completion: dict[str, Kind] = {**shared, **_completion_fields(limits)}
        self.tokenize: dict[str, Kind] = {
            "model": ModelName(limits.model),
            "prompt": String(1),
            "messages": Messages(),
            "add_special_tokens": Boolean("Default: true for a prompt, false for messages."),
            "add_generation_prompt": Boolean("Default: true."),
            "continue_final_message": Boolean(),
            "chat_template_kwargs": AnyObject(),
        }
        self.detokenize: dict[str, Kind] = {
            "model": ModelName(limits.model),
            "tokens": TokenIds(limits.vocab_size, 0),
            "skip_special_tokens": Boolean("Default: false."),
        }

    def chat_schema(self) -> Schema:
        return object_schema(self.chat, ("model", "messages"))

    def completion_schema(self) -> Schema:
        return object_schema(self.completion, ("model", "prompt"))

    def read_chat(self, body: Json) -> ChatRequest:
        """Checks a chat completion's decoded body. Raises ApiError naming the field."""
        checked = check_fields(body_object(body), self.chat, ("model", "messages"))
        self.check_model(checked["model"])
        if checked.get("tools") and checked.get("tool_choice") != "none":
            raise bad_field("tools", "is not supported by this server.", "unsupported_parameter")
        top = checked.get("top_logprobs")
        if top is not None and not checked.get("logprobs", False):
            raise bad_field("top_logprobs", "is only allowed when 'logprobs' is true.")
        logprobs = (top or 0) if checked.get("logprobs", False) else -1
        return ChatRequest(
            conversation=_conversation(checked),
            options=read_options(checked, self.limits, logprobs),
        )

    def read_completion(self, body: Json) -> CompletionRequest:
        """Checks a completion's decoded body. Raises ApiError naming the field."""
        checked = check_fields(body_object(body), self.completion, ("model", "prompt"))
        self.check_model(checked["model"])
        return CompletionRequest(
            prompts=checked["prompt"],
            options=read_options(checked, self.limits, checked.get("logprobs", -1)),
            add_special_tokens=checked.get("add_special_tokens", True),
        )

    def read_tokenize(self, body: Json) -> Conversation | CompletionRequest:
        """Checks the body of /tokenize: messages, or one prompt."""
        checked = check_fields(body_object(body), self.tokenize, ())
        self.check_model(checked.get("model", self.limits.model))
        if ("messages" in checked) == ("prompt" in checked):
            raise bad_field("prompt", "give either 'prompt' or 'messages'.")
        if "messages" in checked:
            return _conversation(checked)
        return CompletionRequest(
            prompts=[checked["prompt"]],
            options=read_options({}, self.limits, -1),
            add_special_tokens=checked.get("add_special_tokens", True),
        )

    def read_detokenize(self, body: Json) -> tuple[list[int], bool]:
        """Checks the body of /detokenize: token ids, and whether to skip special tokens."""
        checked = check_fields(body_object(body), self.detokenize, ("tokens",))
        self.check_model(checked.get("model", self.limits.model))
        return checked["tokens"], checked.get("skip_special_tokens", False)

    def check_model(self, name: str) -> None:
        """Raises a 404 unless `name` is the served model's."""
        if name != self.limits.model:
            raise ApiError(
                404,
                f"The model {shown(name)} does not exist; this server has {self.limits.model!r}.",
                param="model",
                code="model_not_found",
            )


def body_object(body: Json) -> dict[str, Json]:
    """Returns a decoded body that is an object. Raises ApiError for other bodies."""
    if not isinstance(body, dict):
        raise ApiError(400, "The request body must be a JSON object.", code="invalid_body")
    return body


def _conversation(checked: Mapping[str, Json]) -> Conversation:
    continued = checked.get("continue_final_message", False)
    prompted = checked.get("add_generation_prompt", not continued)
    if continued and prompted:
        raise bad_field("continue_final_message", "can't go together with 'add_generation_prompt'.")
    arguments = dict(checked.get("chat_template_kwargs", {}))
    if "reasoning_effort" in checked:
        arguments.setdefault("reasoning_effort", checked["reasoning_effort"])
    return Conversation(
        messages=checked["messages"],
        add_generation_prompt=prompted,
        continue_final_message=continued,
        add_special_tokens=checked.get("add_special_tokens", False),
        template_arguments=arguments,
    )


def _shared_fields(limits: Limits) -> dict[str, Kind]:
    config, vocab_size = limits.config, limits.vocab_size
    new_tokens = Integer(1, config.max_new_tokens, "Most tokens to generate.")
    return {
        "model": ModelName(limits.model),
        "max_tokens": new_tokens,
        "n": Integer(1, config.max_choices, "Choices to generate for each prompt."),
        "temperature": Number(0.0, 2.0, doc="0: greedy."),
        "top_p": Number(0.0, 1.0, above=True),
        "top_k": Integer(-1, 2**31 - 1, "0 or -1: off."),
        "min_p": Number(0.0, 1.0),
        "presence_penalty": Number(-2.0, 2.0),
        "frequency_penalty": Number(-2.0, 2.0),
        "repetition_penalty": Number(0.0, 100.0, above=True, doc="1: off."),
        "logit_bias": LogitBias(vocab_size, "From token id to the bias added to its logit."),
        "seed": Integer(-(2**63), 2**64 - 1, "Same seed, same output."),
        "min_tokens": Integer(0, config.max_new_tokens),
        "ignore_eos": Boolean("Continue after the end-of-sequence token."),
        "stop": StopStrings(_MAX_STOPS, _MAX_STOP_CHARACTERS),
        "stop_token_ids": TokenIds(vocab_size, 0, _MAX_STOP_IDS),
        "include_stop_str_in_output": Boolean(),
        "skip_special_tokens": Boolean("Default: true."),
        "add_special_tokens": Boolean("Add the tokenizer's special tokens to the prompt."),
        "return_token_ids": Boolean("Add token_ids to every choice or chunk."),
        "cache_prompt": Boolean(
            "Default: true. Reuse the KV of a prefix of earlier prompts; keep this prompt's KV."
        ),
        "cache_salt": String(0, 256, "Prompts share KV only if their salts are equal."),
        "stream": Boolean("Answer as server-sent events."),
        "stream_options": Object(
            {
                "include_usage": Boolean("Send a last chunk with the usage of all choices."),
                "continuous_usage_stats": Boolean(
                    "With include_usage: every chunk shows its choice's usage so far."
                ),
                "include_obfuscation": Ignored(Boolean()),
            }
        ),
        **SHARED,
    }


def _chat_fields(limits: Limits) -> dict[str, Kind]:
    tool = Object(
        {
            "type": String(),
            "function": AnyObject(),
        },
        ("type",),
    )
    return {
        "messages": Messages(),
        "max_completion_tokens": Integer(
            1, limits.config.max_new_tokens, "Newer name of max_tokens; takes precedence over it."
        ),
        "logprobs": Boolean(),
        "top_logprobs": Integer(0, limits.config.max_logprobs),
        "add_generation_prompt": Boolean("Default: true."),
        "continue_final_message": Boolean("Continue the last message, not a new message."),
        "chat_template_kwargs": AnyObject("Further arguments of the chat template."),
        "reasoning_effort": String(0, 32, "Passed to the chat template."),
        "response_format": Object(
            {
                "type": OneOf(("text",), " Structured output is not supported by this server."),
                "json_schema": Unsupported(),
            },
            ("type",),
        ),
        "tools": ListOf(tool, doc="Only together with tool_choice 'none'."),
        **CHAT,
    }


def _completion_fields(limits: Limits) -> dict[str, Kind]:
    return {
        "prompt": Prompts(limits.vocab_size, limits.context_tokens),
        "max_tokens": Integer(
            0,
            limits.config.max_new_tokens,
            "Most tokens to generate; 0, with echo: the answer is only the prompt.",
        ),
        "logprobs": Integer(0, limits.config.max_logprobs),
        "best_of": Integer(1, limits.config.max_choices, "Must equal n."),
        "echo": Boolean("Echo the prompt before the completion."),
        **COMPLETION,
    }
