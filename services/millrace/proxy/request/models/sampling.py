"""The fields of a body that say how tokens are chosen and shown, in all endpoints that generate."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, with_config
from typing_extensions import TypedDict

from millrace.proxy.request.models.fields import STRICT, Within, text_or_array
from millrace.proxy.request.models.objectives import ObjectiveFields, Priority

_MOST_BAD_WORDS = 1024

_Stop = Annotated[str, Field(min_length=1, max_length=512)]
_OneStop = Annotated[_Stop, AfterValidator(lambda text: (text,))]
#: Texts that end the answer.
Stops = Annotated[list[_Stop], Field(max_length=16, fail_fast=True), AfterValidator(tuple)]
_BadWord = Annotated[str, Field(min_length=1, max_length=512)]
_BadWords = Annotated[list[_BadWord], Field(max_length=_MOST_BAD_WORDS, fail_fast=True)]


@with_config(STRICT)
class CustomParams(TypedDict, total=False):
    """SGLang's parameters of logits processors."""

    thinking_budget: Annotated[
        Annotated[int, Within(-1, 2**31 - 1)] | None, Field(description="max_reasoning_tokens")
    ]


class SamplingFields(TypedDict, total=False):
    """The fields that have the same limits on every server."""

    temperature: Annotated[
        float | None, Within(0, 2), Field(description="Flattens the distribution. 0: greedy.")
    ]
    top_p: Annotated[
        float | None,
        Within(0, 1, above=True),
        Field(description="Only the likeliest tokens, of this probability together. 1: off."),
    ]
    top_k: Annotated[
        int | None,
        Within(-1, 2**31 - 1),
        Field(description="Only so many of the likeliest tokens. 0 or -1: off."),
    ]
    min_p: Annotated[
        float | None,
        Within(0, 1),
        Field(description="Only tokens of this share of the likeliest token's probability."),
    ]
    presence_penalty: Annotated[
        float | None,
        Within(-2, 2),
        Field(description="Subtracted from the logits of tokens that the answer has."),
    ]
    frequency_penalty: Annotated[
        float | None,
        Within(-2, 2),
        Field(description="Subtracted as often as the answer has the token."),
    ]
    repetition_penalty: Annotated[
        float | None,
        Within(0, 100, above=True),
        Field(description="Divides logits of tokens in prompt and answer. 1: off."),
    ]
    seed: Annotated[
        int | None, Within(-(2**63), 2**64 - 1), Field(description="Same seed, same output.")
    ]
    ignore_eos: Annotated[
        bool | None, Field(description="Continue after the end-of-sequence token.")
    ]
    stop: Annotated[
        Annotated[
            Any,
            text_or_array(Stops, "strings", text=_OneStop),
        ]
        | None,
        Field(description="Up to 16 texts that end the answer."),
    ]
    include_stop_str_in_output: Annotated[
        bool | None, Field(description="Keep the text that ended the answer.")
    ]
    no_stop_trim: Annotated[
        bool | None, Field(description="SGLang's name of include_stop_str_in_output.")
    ]
    skip_special_tokens: Annotated[
        bool | None, Field(description="Default: true. Leave special tokens out of the text.")
    ]
    bad_words: Annotated[_BadWords | None, Field(description="Texts that the answer never has.")]
    custom_params: Annotated[
        CustomParams | None, Field(description="SGLang's name: `thinking_budget` in it.")
    ]
    cache_salt: Annotated[
        Annotated[str, Field(max_length=256)] | None,
        Field(description="Prompts share KV only if their salts are equal."),
    ]
    priority: Priority
    millrace: Annotated[
        ObjectiveFields | None, Field(description="Objectives, as the x-millrace-* headers.")
    ]
