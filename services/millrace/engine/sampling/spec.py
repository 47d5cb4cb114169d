"""The sampling settings of a request, and the state of a sequence when its next token is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millrace.core import request_spec
from millrace.core.request_spec import SamplingParams
from millrace.engine.sampling.bad_words import BadWords
from millrace.engine.sampling.philox import uniforms
from millrace.engine.sampling.reasoning import Reasoning
from millrace.engine.sampling.token_counts import TokenCounts
from millrace.grammar.matcher import Matcher

Ids = npt.NDArray[np.int64]
PromptIds = npt.NDArray[np.integer] | Sequence[int] | Tensor | None

_RUN: Final = 64


@dataclass(frozen=True, kw_only=True)
class SamplingSpec(SamplingParams):
    """The sampling settings of one request, with what the sampler derives from them.

    Ids outside the vocabulary have no effect. The prompt's last
    `resumed_tokens` were generated in an earlier submission of the request: they count as output,
    for penalties and for the number that decides a draw. `max_tokens` and `min_tokens` count the
    tokens after them.
    """

    resumed_tokens: int = 0

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.stop_token_ids)

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @cached_property
    def is_filtered(self) -> bool:
        """Returns whether sampling first drops unlikely tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @cached_property
    def needs_prompt_ids(self) -> bool:
        follows = self.constraint is not None or self.reasoning is not None or bool(self.bad_words)
        resumes = self.resumed_tokens > 0 and (self.needs_counts or follows)
        return resumes or self.repetition_penalty != 1.0

    @cached_property
    def guided(self) -> bool:
        """Returns whether a grammar or a budget of reasoning decides about tokens."""
        return self.constraint is not None or self.reasoning is not None

    @cached_property
    def needs_counts(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @cached_property
    def needs_host(self) -> bool:
        """Returns whether a token's choice, or its result, needs the tokens before it on the
        host."""
        return (
            self.needs_counts
            or bool(self.logit_bias)
            or bool(self.allowed_token_ids)
            or bool(self.bad_words)
            or self.guided
            or self.logprobs >= 0
            or (self.min_tokens > 0 and bool(self.stop_token_ids))
        )

    @cached_property
    def bias(self) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Returns `logit_bias` as arrays: ids int64 [k], values float32 [k]."""
        return (
            np.fromiter(self.logit_bias.keys(), np.int64, len(self.logit_bias)),
            np.fromiter(self.logit_bias.values(), np.float32, len(self.logit_bias)),
        )

    @cached_property
    def stop_id_array(self) -> Ids:
        return np.array(self.stop_token_ids, dtype=np.int64)

    @cached_property
    def allowed_id_array(self) -> Ids:
        return np.array(self.allowed_token_ids, dtype=np.int64)


@dataclass(slots=True)
class SamplingRow:
    """The state of one sequence when its next token is chosen.

    `output_position` counts its output tokens, without resumed tokens: 0 for the token that prefill
    samples. `counts` is there for specs with penalties only.
    """

    spec: SamplingSpec
    choice: int = 0
    output_position: int = 0
    counts: TokenCounts | None = None
    bad_words: BadWords | None = None
    matcher: Matcher | None = None  # of specs with a constraint
    reasoning: Reasoning | None = None  # of specs with a budget of it
    error: str = ""  # why no token can be chosen
    _draws: npt.NDArray[np.float64] | None = field(default=None, repr=False)
    _run: int = field(default=-1, repr=False)

    @classmethod
    def first(
        cls, spec: SamplingSpec, choice: int = 0, prompt_ids: PromptIds = None
    ) -> SamplingRow:
        """Returns the row of a sequence without output; `append` adds tokens to it.

        `prompt_ids` (int [L]) are needed when the spec `needs_prompt_ids`, else ignored; ValueError
        without.
        """
        if spec.needs_prompt_ids and prompt_ids is None:
            raise ValueError("this sampling needs the prompt's token ids")
        row = cls(spec, choice)
        if spec.needs_counts and prompt_ids is not None and spec.needs_prompt_ids:
            row.counts = TokenCounts(prompt_ids, spec.resumed_tokens)
        elif spec.needs_counts:
            row.counts = TokenCounts()
        if spec.bad_words:
            row.bad_words = BadWords(spec.bad_words)
            for token_id in resumed_ids(spec, prompt_ids):
                row.bad_words.append(token_id)
        return row

    def append(self, token_id: int) -> None:
        """Adds an output token to the state."""
        self.output_position += 1
        if self.counts is not None:
            self.counts.add(token_id)
        if self.bad_words is not None:
            self.bad_words.append(token_id)
        self.follow(token_id)
        if self.is_constrained and self.matcher is not None:
            self.matcher.begin_mask()  # the next step's pass hides it

    def follow(self, token_id: int) -> None:
        """Moves the reasoning, or else the grammar, past a token of the answer."""
        answers = self.reasoning is None or self.reasoning.append(token_id)
        if answers and self.matcher is not None:
            self.matcher.consume(token_id)

    @property
    def is_constrained(self) -> bool:
        """Returns whether the grammar decides about the next token."""
        begun = self.reasoning is None or self.reasoning.answers
        return self.matcher is not None and begun

    def uniform(self, ahead: int = 0) -> float:
        """Returns the number in [0, 1) that decides the position `ahead` tokens after this one.

        A run of them is drawn at a time.
        """
        position = self.spec.resumed_tokens + self.output_position + ahead
        run, offset = divmod(position, _RUN)
        if self._draws is None or self._run != run:
            self._run = run
            choice = self.spec.first_choice + self.choice
            self._draws = uniforms(self.spec.seed, choice, run * _RUN, _RUN)
        return float(self._draws[offset])

    @property
    def edits_logits(self) -> bool:
        """Returns whether logits are changed before temperature and filters."""
        spec = self.spec
        return (
            self.counts is not None
            or bool(spec.logit_bias)
            or bool(spec.allowed_token_ids)
            or self.bad_words is not None
            or spec.constraint is not None
            or self.bars_stop_ids
            or bool(self.error)
            or (self.reasoning is not None and bool(self.reasoning.only))
        )

    @property
    def bars_stop_ids(self) -> bool:
        return self.output_position < self.spec.min_tokens and bool(self.spec.stop_token_ids)


def resumed_ids(spec: SamplingSpec, prompt_ids: PromptIds) -> list[int]:
    """Returns the tokens of the prompt that an earlier submission of the request generated."""
    if not spec.resumed_tokens or prompt_ids is None:
        return []
    ids: list[int] = np.asarray(prompt_ids[-spec.resumed_tokens :]).tolist()
    return ids


def finish_reason(spec: SamplingSpec, output_len: int, token_id: int) -> str:
    """The effect of `token_id`, the `output_len`-th output token (from 1, without resumed
    tokens): "stop", "length", or empty if the sequence continues."""
    return request_spec.finish_reason(spec, output_len, token_id, spec.stop_ids)
