"""The specification of a request, as its proxy submits it: every service reads it, none changes
it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from millrace.core.incarnation import Incarnation
from millrace.core.request import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A grammar that the answer's text follows to its end.

    `kind` is json_schema, json_object, regex, choice, grammar or structural_tag. `text` is the
    schema, the regular expression, a JSON array of choices, a grammar in Lark's notation or GBNF,
    or a structural tag; of json_object the options of white space.
    """

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningBudget:
    """The most tokens of reasoning before an answer; then the end of the reasoning is forced.

    `form` says how the model marks reasoning: think, mistral or harmony (`grammar.reasoning`).
    `opened`: the prompt opens the reasoning; of harmony: it opens a message of the assistant.
    `calls`: the model may call tools after the reasoning. With a constraint, the constraint begins
    after the reasoning.
    """

    max_tokens: int
    form: str
    opened: bool = False
    calls: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens are chosen. The defaults are greedy, and filter and penalise nothing.

    The proxy has checked the ranges. `stop_token_ids` includes the model's end-of-sequence ids
    unless the client ignores them.
    """

    max_tokens: int  # 0: none is generated, the request is prefill only
    min_tokens: int = 0
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1  # choices
    first_choice: int = 0  # the first choice's number in the client's request, which decides draws
    logprobs: int = -1  # -1: none; k: the chosen token's and the k likeliest
    prompt_logprobs: int = -1
    constraint: Constraint | None = None
    allowed_token_ids: tuple[int, ...] = ()  # none: all may be generated
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences that the answer never has
    reasoning: ReasoningBudget | None = None


def finish_reason(
    sampling: SamplingParams, output_len: int, token_id: int, stop_ids: Container[int]
) -> str:
    """The effect of `token_id`, the `output_len`-th output token (from 1).

    `stop_ids` are the stop token ids of `sampling`, for a fast look-up.

    "stop": it is a stop id; "length": `max_tokens` is reached; "": the sequence continues. A stop
    id that comes with the last allowed token counts as "stop". Below `min_tokens` a stop id ends
    an answer only where its grammar has ended.
    """
    may_stop = output_len > sampling.min_tokens or sampling.constraint is not None
    if token_id in stop_ids and may_stop:
        return "stop"
    return "length" if output_len >= sampling.max_tokens else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """A request without its prompt's token ids, which are in the request store.

    The prompt's last `resumed_tokens` were generated in an earlier submission of the request.
    `prefix_hashes` name the prompt's whole blocks of `prefix_block_tokens` (`core.kv.prefix`); the
    first of them is chained to `prefix_root`. With 0 `prefix_block_tokens` no KV is shared.

    `deaths` names the lost instances at which the request was open, oldest first
    (`core.scheduler.dispatch.suspects`).

    `pooling` says which final hidden state a prefill-only request is answered with, or "" if with
    none: that of the prompt's "last" token, or the "mean" over all its tokens.
    """

    request_id: str
    proxy: Incarnation
    prompt_tokens: int
    sampling: SamplingParams
    slo: Slo = field(default_factory=Slo)
    arrival_unix_s: float = 0.0
    traceparent: str = ""  # W3C trace context; empty: none
    resumed_tokens: int = 0
    prefix_hashes: Sequence[int] = ()
    prefix_block_tokens: int = 0
    prefix_root: int = 0
    tenant: str = "default"
    priority: int = 0  # among its tenant's requests of its class; the smaller goes first
    pooling: str = ""
    deaths: Sequence[Incarnation] = ()

    @property
    def needs_whole_prompt(self) -> bool:
        """Returns whether one attempt must compute every token: cached KV has no hidden states."""
        return self.sampling.prompt_logprobs >= 0 or self.pooling == "mean"
