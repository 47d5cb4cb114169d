"""Reads request bodies within the limits of one model: its vocabulary, context and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, Required

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from millrace.proxy.errors import bad_field, shown
from millrace.proxy.request.models.anthropic import CountBody, MessageBody
from millrace.proxy.request.models.fields import Adapter, OneType, Within, adapter
from millrace.proxy.request.models.generation import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from millrace.proxy.request.models.responses import ResponseBody
from millrace.proxy.request.options import Limits, Options, read_options
from millrace.proxy.request.reading import read_body
from millrace.proxy.request.tools import ToolOptions, read_history

_MAX_STOP_IDS = 1024
_MAX_ALLOWED_IDS = 16384
#: Fields with limits of one server that responses have, too.
_OF_RESPONSES = ("logit_bias", "max_reasoning_tokens", "thinking_token_budget")
_REASONING = "After so many tokens of reasoning its end is forced. -1: no budget."
_MOST = "Most tokens to generate. 0, with echo or prompt_logprobs: only the prompt is computed."
_LIKELIEST = "So many of the likeliest tokens at each position."
_OF_PROMPT = "Log probabilities of the prompt's tokens, and of so many likeliest at each position."
#: The most prompts of one completion request.
MAX_PROMPTS = 256

Prompt = str | list[int]
#: The field `model`.
MODEL = Annotated[str, Field(description="The model that answers.")]
_Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages, and how the chat template renders them."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    template_arguments: dict[str, Any]
    tools: ToolOptions | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    conversation: Conversation
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    prompts: list[Prompt]
    options: Options
    add_special_tokens: bool


class BodyTypes(NamedTuple):
    """Types of the bodies for one model."""

    chat: Adapter
    completion: Adapter
    response: Adapter
    message: Adapter
    token_count: Adapter
    tokenize: Adapter
    detokenize: Adapter


class Bodies:
    """Reads request bodies for one model, by types that are built once for the same limits.

    The field `model` has been read before: it chose this reader.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        config = limits.config
        self.types = _body_types(
            vocab_size=limits.vocab_size,
            context_tokens=limits.context_tokens,
            max_new_tokens=config.max_new_tokens,
            max_logprobs=config.max_logprobs,
            max_choices=config.max_choices,
        )

    def read_chat(self, body: bytes) -> ChatRequest:
        """Checks a chat completion's body. Raises ApiError naming the field."""
        checked = read_body(self.types.chat, body)
        top = checked.get("top_logprobs")
        if top is not None and not checked.get("logprobs", False):
            raise bad_field("top_logprobs", "is only allowed when 'logprobs' is true.")
        logprobs = (top or 0) if checked.get("logprobs", False) else -1
        options = read_options(checked, self.limits, logprobs)
        return ChatRequest(conversation=_conversation(checked, options.tools), options=options)

    def read_completion(self, body: bytes) -> CompletionRequest:
        """Checks a completion's body. Raises ApiError naming the field."""
        checked = read_body(self.types.completion, body)
        return CompletionRequest(
            prompts=prompts_of(checked["prompt"]),
            options=read_options(checked, self.limits, checked.get("logprobs", -1)),
            add_special_tokens=checked.get("add_special_tokens", True),
        )

    def read_tokenize(self, body: bytes) -> Conversation | CompletionRequest:
        """Checks the body of /tokenize: messages, or one prompt."""
        checked = read_body(self.types.tokenize, body)
        if ("messages" in checked) == ("prompt" in checked):
            raise bad_field("prompt", "give either 'prompt' or 'messages'.")
        if "messages" in checked:
            return _conversation(checked)
        return CompletionRequest(
            prompts=[checked["prompt"]],
            options=read_options({}, self.limits, -1),
            add_special_tokens=checked.get("add_special_tokens", True),
        )

    def read_detokenize(self, body: bytes) -> tuple[list[int], bool]:
        """Checks the body of /detokenize: token ids, and whether to skip special tokens."""
        checked = read_body(self.types.detokenize, body)
        return checked["tokens"], checked.get("skip_special_tokens", False)


@lru_cache(maxsize=64)
def _body_types(
    *,
    vocab_size: int,
    context_tokens: int,
    max_new_tokens: int,
    max_logprobs: int,
    max_choices: int,
) -> BodyTypes:
    shared: dict[str, Any] = {
        "model": Required[MODEL],
        "max_tokens": _count(0, max_new_tokens, _MOST),
        "prompt_logprobs": _count(0, max_logprobs, _OF_PROMPT),
        "n": _count(1, max_choices, "Choices to generate for each prompt."),
        "min_tokens": _count(0, max_new_tokens, "No end of the answer before so many tokens."),
        "logit_bias": Annotated[
            _logit_bias(vocab_size) | None,
            Field(description="From token id to the bias added to its logit."),
        ],
        "stop_token_ids": Annotated[
            _token_ids(vocab_size, 0, _MAX_STOP_IDS) | None,
            Field(description="Further tokens that end the answer."),
        ],
        "allowed_token_ids": Annotated[
            _token_ids(vocab_size, 1, _MAX_ALLOWED_IDS) | None,
            Field(description="No other tokens are generated, no end of sequence either."),
        ],
        "truncate_prompt_tokens": truncation_type(context_tokens),
        "thinking_token_budget": _count(-1, max_new_tokens, "vLLM's name of max_reasoning_tokens."),
        "max_reasoning_tokens": _count(-1, max_new_tokens, _REASONING),
    }
    chat = adapter(
        "ChatRequest",
        ChatBody,
        **shared,
        max_completion_tokens=_count(
            0, max_new_tokens, "Newer name of max_tokens; takes precedence over it."
        ),
        top_logprobs=_count(0, max_logprobs, _LIKELIEST),
    )
    completion = adapter(
        "CompletionRequest",
        CompletionBody,
        **shared
        | {
            "prompt": Required[prompt_type(vocab_size)],
            "logprobs": _count(0, max_logprobs, "Log probabilities, and so many of the likeliest."),
            "best_of": _count(1, max_choices, "Choices to generate; the best n are answered."),
        },
    )
    response = adapter(
        "ResponseRequest",
        ResponseBody,
        model=Required[MODEL],
        max_output_tokens=_count(1, max_new_tokens, "Most tokens to generate."),
        top_logprobs=_count(0, max_logprobs, _LIKELIEST),
        **{name: shared[name] for name in _OF_RESPONSES},
    )
    most = Field(description="Most tokens to generate.")
    message = adapter(
        "MessageRequest",
        MessageBody,
        model=Required[MODEL],
        max_tokens=Required[Annotated[int, Within(1, max_new_tokens), most]],
        logit_bias=shared["logit_bias"],
    )
    token_count = adapter("CountRequest", CountBody, model=Required[MODEL])
    tokenize = adapter("Tokenize", TokenizeBody, model=str | None)
    tokens = Required[_token_ids(vocab_size, 0)]
    detokenize = adapter("Detokenize", DetokenizeBody, model=str | None, tokens=tokens)
    return BodyTypes(chat, completion, response, message, token_count, tokenize, detokenize)


def prompts_of(value: Any) -> list[Prompt]:  # noqa: ANN401 - of `prompt_type`
    """Returns the prompts of a field of `prompt_type`."""
    alone = isinstance(value, str) or isinstance(value[0], int)
    return [value] if alone else value


def _conversation(checked: Mapping[str, Any], tools: ToolOptions | None = None) -> Conversation:
    continued = checked.get("continue_final_message", False)
    prompted = checked.get("add_generation_prompt", not continued)
    if continued and prompted:
        raise bad_field("continue_final_message", "can't go together with 'add_generation_prompt'.")
    arguments = dict(checked.get("chat_template_kwargs", {}))
    if "reasoning_effort" in checked:
        arguments.setdefault("reasoning_effort", checked["reasoning_effort"])
    return Conversation(
        messages=read_history(checked["messages"]),
        tools=tools,
        add_generation_prompt=prompted,
        continue_final_message=continued,
        add_special_tokens=checked.get("add_special_tokens", False),
        template_arguments=arguments,
        cache_salt=checked.get("cache_salt", ""),
    )


def _count(low: int, high: int, doc: str | None = None) -> Any:  # noqa: ANN401 - a type
    return Annotated[Annotated[int, Within(low, high)] | None, Field(description=doc)]


def _token_ids(vocab_size: int, fewest: int, most: int | None = None) -> Any:  # noqa: ANN401 - a type
    token_id = Annotated[int, Within(0, vocab_size - 1)]
    return Annotated[list[token_id], Field(min_length=fewest, max_length=most, fail_fast=True)]


def truncation_type(context_tokens: int) -> Any:  # noqa: ANN401 - a type
    """Returns the type of `truncate_prompt_tokens`."""
    told = "Keep so many tokens of the prompt. -1: those that fit."
    described = Field(description=told, json_schema_extra={"not": {"const": 0}})
    return Annotated[Annotated[int, Within(-1, context_tokens)] | None, described]


def _logit_bias(vocab_size: int) -> Any:  # noqa: ANN401 - a type
    def by_id(given: dict[str, float]) -> dict[int, float]:
        for key in given:
            # isdigit alone accepts digits of other scripts; 10 digits hold every possible id.
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                wrong = f"keys are token ids, got {shown(key)}."
                raise PydanticCustomError("invalid_value", wrong)
            if int(key) >= vocab_size:
                wrong = f"token id {int(key)} is outside the vocabulary of {vocab_size}."
                raise PydanticCustomError("invalid_value", wrong)
        return {int(key): bias for key, bias in given.items()}

    described = Field(json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}})
    return Annotated[
        dict[str, Annotated[float, Within(-100, 100)]], described, AfterValidator(by_id)
    ]


def prompt_type(vocab_size: int, most: int = MAX_PROMPTS) -> Any:  # noqa: ANN401 - a type
    """Returns the type of `prompt`: a string, strings, token ids or lists of token ids.

    `most`: strings, or lists of token ids.
    """
    ids = _token_ids(vocab_size, 1)
    many = Field(min_length=1, max_length=most, fail_fast=True)
    of_type = OneType(
        _kind_of_prompt,
        "a string or an array",
        ids=ids,
        lists=Annotated[list[ids], many],  # type: ignore[valid-type] # made from the limits
        text=_Text,
        texts=Annotated[list[_Text], many],
    )
    doc = "One or several texts, or lists of token ids."
    return Annotated[Any, of_type, Field(description=doc)]


def _kind_of_prompt(prompt: object) -> str | None:
    """Returns the tag of a prompt's type; the first element of an array decides."""
    if isinstance(prompt, str):
        return "text"
    if not isinstance(prompt, list):
        return None
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"
