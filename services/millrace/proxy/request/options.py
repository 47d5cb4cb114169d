"""The options of a checked request, and the limits of this server.

Every request makes its options: named tuples, because a frozen dataclass of so many fields takes
four times as long to make.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from millrace.core.config import ProxyConfig
from millrace.core.request_spec import Constraint
from millrace.proxy.errors import bad_field
from millrace.proxy.request.beams import read_length_penalty
from millrace.proxy.request.models.constraints import read_constraint
from millrace.proxy.request.tools import ToolOptions, read_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling defaults for absent fields: the model's generation_config, or else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFacts:
    """How the model turns a text into a vector.

    `pooling`: as `RequestSpec.pooling`, or the name of another way, which no instance computes.
    `hidden_size`: floats of a vector. `dimensions`: lengths to which it may be cut; none: any.
    """

    pooling: str = "last"
    hidden_size: int = 0
    dimensions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a request, from the model and the configuration. All counts are tokens."""

    model: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    embedding: EmbeddingFacts = field(default_factory=EmbeddingFacts)
    config: ProxyConfig = field(default_factory=ProxyConfig)


class Sampling(NamedTuple):
    """How to draw tokens. `max_tokens` None: as many as fit the context; 0: see `prefill_only`."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop_token_ids: tuple[int, ...]
    logprobs: int  # -1: none; k: the chosen token and the k likeliest tokens
    constraint: Constraint | None = None
    allowed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """How many tokens of a prompt are kept (-1: those that fit), and the side that is cut."""

    tokens: int
    side: str


class Options(NamedTuple):
    """The options of both completion endpoints. `max_tokens_field` is the name the client used."""

    sampling: Sampling
    choices: int = 1  # that are generated
    best: int | None = None  # so many of each prompt's choices are answered; None: all
    shown_logprobs: int = -1  # as `Sampling.logprobs`, in the answer
    tokens_as_ids: bool = False  # log probabilities show ids in the place of texts
    bad_words: tuple[str, ...] = ()
    reasoning_tokens: int = -1  # most tokens of reasoning; -1: no budget
    reasoning_field: str = ""  # that the client used
    truncation: Truncation | None = None
    priority: int = 0  # as `RequestSpec.priority`
    objectives: Mapping[str, Any] = MappingProxyType({})  # the body's field `millrace`
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # every chunk of a stream shows the usage so far
    include_progress: bool = False  # a stream shows how far its prompt is
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    echo: bool = False
    cache_prompt: bool = True
    cache_salt: str = ""
    max_tokens_field: str = "max_tokens"
    constraint_field: str = ""  # that the client used; empty: no constraint
    tools: ToolOptions | None = None
    include_reasoning: bool = True
    pooling: str = ""  # of a request for a vector: as `RequestSpec.pooling`
    shown_prompt_logprobs: int = -1  # the field prompt_logprobs; -1: absent
    length_penalty: float | None = None  # of a beam search; None: tokens are sampled

    @property
    def prefill_only(self) -> bool:
        """Whether no token is generated: the answer is the echoed prompt, or a vector."""
        return self.sampling.max_tokens == 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token of the prompt is computed, whatever is cached."""
        return self.prompt_logprobs >= 0 or self.pooling == "mean"

    @property
    def prompt_logprobs(self) -> int:
        """Log probabilities of the prompt's own tokens, counted as in `Sampling.logprobs`."""
        return max(self.shown_logprobs if self.echo else -1, self.shown_prompt_logprobs)

    def kept_tokens(self, prompt_tokens: int, limits: Limits) -> int:
        """Returns how many tokens of a prompt are kept. Raises ApiError naming the field."""
        if self.truncation is None:
            return prompt_tokens
        asked = self.sampling.max_tokens
        room = limits.context_tokens - (1 if asked is None else asked)
        wanted = self.truncation.tokens
        if wanted > room or room < 1:
            raise bad_field(
                "truncate_prompt_tokens",
                f"{max(wanted, 1)} prompt tokens and {asked or 1} to generate exceed this model's "
                f"context of {limits.context_tokens} tokens.",
                "context_length_exceeded",
            )
        return min(prompt_tokens, room if wanted < 0 else wanted)

    def new_tokens(self, prompt_tokens: int, limits: Limits, prompt_field: str) -> int:
        """Returns the most tokens to generate after a prompt of `prompt_tokens` in `prompt_field`.

        Raises ApiError (context_length_exceeded) if the requested tokens do not fit.
        """
        room = limits.context_tokens - prompt_tokens
        if room < (0 if self.prefill_only else 1):
            more = "" if self.prefill_only else " and at least one more"
            raise bad_field(
                prompt_field,
                f"the prompt has {prompt_tokens} tokens; this model's context of "
                f"{limits.context_tokens} tokens must hold it{more}.",
                "context_length_exceeded",
            )
        asked = self.sampling.max_tokens
        if asked is None:
            return min(room, max(limits.config.max_new_tokens, self.sampling.min_tokens))
        if asked > room:
            raise bad_field(
                self.max_tokens_field,
                f"{prompt_tokens} prompt tokens and {asked} to generate exceed this model's "
                f"context of {limits.context_tokens} tokens.",
                "context_length_exceeded",
            )
        return asked


def pooling_options(checked: Mapping[str, Any], limits: Limits, pooling: str) -> Options:
    """Returns the options of requests for a vector, of a body with checked fields."""
    return Options(
        sampling=_sampling({}, limits, 0, -1, None),
        cache_prompt=checked.get("cache_prompt", True),
        cache_salt=checked.get("cache_salt", ""),
        pooling=pooling,
        truncation=_truncation(checked, "right"),
        priority=checked.get("priority", 0),
        objectives=stated(checked),
    )


def stated(checked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the objectives of a body with checked fields."""
    given = checked.get("millrace", {})
    return {name: value for name, value in given.items() if value is not None}


def _truncation(checked: Mapping[str, Any], side: str) -> Truncation | None:
    """Returns how the prompts are cut; `side` is cut unless the body says otherwise."""
    tokens = checked.get("truncate_prompt_tokens")
    if tokens is None:
        return None
    if tokens == 0:
        raise bad_field("truncate_prompt_tokens", "must be -1 or at least 1, got 0.")
    return Truncation(tokens=tokens, side=checked.get("truncation_side", side))


def _reasoning_budget(checked: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the field with the most tokens of reasoning, and the tokens (-1: no budget)."""
    names = ("max_reasoning_tokens", "thinking_token_budget")
    found = [(name, checked[name]) for name in names if name in checked]
    custom = checked.get("custom_params", {}).get("thinking_budget")
    if custom is not None:
        found.append(("custom_params.thinking_budget", custom))
    if len({tokens for _, tokens in found}) > 1:
        raise bad_field(found[1][0], f"must equal '{found[0][0]}' when both are given.")
    return found[0] if found else ("", -1)


def _choices(checked: Mapping[str, Any]) -> tuple[int, int | None]:
    """Returns how many choices of a prompt are generated, and how many answered (None: all)."""
    shown = checked.get("n", 1)
    made = checked.get("best_of", shown)
    if made == shown:
        return shown, None
    if made < shown:
        raise bad_field("best_of", f"must be at least 'n' ({shown}), got {made}.")
    for name in ("stream", "echo"):
        if checked.get(name, False):
            raise bad_field("best_of", f"must equal 'n' when '{name}' is true.")
    return made, shown


def read_options(checked: Mapping[str, Any], limits: Limits, logprobs: int) -> Options:
    """Returns the options of a body with checked fields; checks that the fields fit together."""
    get = checked.get
    choices, best = _choices(checked)
    stream = get("stream", False)
    if "stream_options" in checked and not stream:
        raise bad_field("stream_options", "is only allowed when 'stream' is true.")
    stream_options = get("stream_options", {})
    include_usage = stream_options.get("include_usage", False)
    field_name = "max_completion_tokens" if "max_completion_tokens" in checked else "max_tokens"
    scored = get("prompt_logprobs", -1)
    if get(field_name) == 0 and not get("echo", False) and scored < 0:
        wanted = "must be at least 1 without 'echo' or 'prompt_logprobs', got 0."
        raise bad_field(field_name, wanted)
    if stream and scored >= 0:
        raise bad_field("prompt_logprobs", "can't be combined with 'stream'.")
    tools = read_tools(checked)
    constraint_field, constraint = _constraint(checked, tools)
    if constraint is not None and get("ignore_eos", False):
        raise bad_field("ignore_eos", f"can't be combined with '{constraint_field}'.")
    reasoning_field, reasoning_tokens = _reasoning_budget(checked)
    judged = logprobs if best is None else max(logprobs, 0)  # the best are the likeliest
    sampling = _sampling(checked, limits, checked.get(field_name), judged, constraint)
    return Options(
        sampling=sampling,
        choices=choices,
        best=best,
        shown_logprobs=logprobs,
        tokens_as_ids=get("return_tokens_as_token_ids", False),
        bad_words=tuple(dict.fromkeys(get("bad_words", ()))),
        reasoning_tokens=reasoning_tokens,
        reasoning_field=reasoning_field,
        truncation=_truncation(checked, "left"),
        priority=checked.get("priority", 0),
        objectives=stated(checked),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and stream_options.get("continuous_usage_stats", False),
        include_progress=stream_options.get("include_progress") or False,
        stop=get("stop", ()),
        include_stop=get("include_stop_str_in_output", get("no_stop_trim", False)),
        skip_special_tokens=get("skip_special_tokens", True),
        return_token_ids=get("return_token_ids", False),
        echo=get("echo", False),
        cache_prompt=get("cache_prompt", True),
        cache_salt=get("cache_salt", ""),
        max_tokens_field=field_name,
        constraint_field=constraint_field,
        tools=tools,
        include_reasoning=get("include_reasoning", True),
        # Of a prompt that is only echoed, the engine computes as little as it can.
        pooling="last" if sampling.max_tokens == 0 and max(logprobs, scored) < 0 else "",
        shown_prompt_logprobs=scored,
        length_penalty=read_length_penalty(
            checked, constraint_field, chooses_best=best is not None
        ),
    )


def _constraint(
    checked: Mapping[str, Any], tools: ToolOptions | None
) -> tuple[str, Constraint | None]:
    """Returns the field that constrains the answer, and the constraint; at most one may."""
    field_name, constraint = read_constraint(checked)
    if tools is None or tools.constraint is None:
        return field_name, constraint
    # As in OpenAI's API, the form of the answer's text says nothing of calls.
    if constraint is not None and not field_name.startswith("response_format"):
        raise bad_field(field_name, f"can't be combined with a forced '{tools.choice_field}'.")
    return tools.choice_field, tools.constraint


def _sampling(
    checked: Mapping[str, Any],
    limits: Limits,
    max_tokens: int | None,
    logprobs: int,
    constraint: Constraint | None,
) -> Sampling:
    get, defaults = checked.get, limits.defaults
    min_tokens = get("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_field("min_tokens", f"must be at most max_tokens ({max_tokens}).")
    stop_ids = dict.fromkeys(get("stop_token_ids", ()))
    if not get("ignore_eos", False):
        stop_ids |= dict.fromkeys(limits.eos_token_ids)
    seed = get("seed")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=get("temperature", defaults.temperature),
        top_p=get("top_p", defaults.top_p),
        top_k=max(0, get("top_k", defaults.top_k)),
        min_p=get("min_p", defaults.min_p),
        repetition_penalty=get("repetition_penalty", defaults.repetition_penalty),
        presence_penalty=get("presence_penalty", 0.0),
        frequency_penalty=get("frequency_penalty", 0.0),
        logit_bias=get("logit_bias", {}),
        # Clients may give any signed 64-bit seed; the message's field is unsigned.
        seed=random.getrandbits(63) if seed is None else seed & 0xFFFF_FFFF_FFFF_FFFF,
        stop_token_ids=tuple(stop_ids),
        logprobs=logprobs,
        constraint=constraint,
        allowed_token_ids=tuple(dict.fromkeys(get("allowed_token_ids", ()))),
    )
