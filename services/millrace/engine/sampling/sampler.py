"""Chooses the next token of every sequence of a batch.

Order of work on a row's logits: repetition penalty over prompt and output (divide if positive,
multiply if negative), presence and frequency penalties over the output, `logit_bias`, all but
`allowed_token_ids` barred, `bad_words` and, below `min_tokens`, stop ids barred, tokens barred that
the row's grammar or its budget of reasoning does not allow; then greedy choice, or temperature,
`top_k`, `top_p` of what is left, `min_p` relative to the likeliest, and a draw from what remains.

A row's token depends on its own logits, spec and (seed, choice, output position) alone. Draws
invert the CDF in float64, with one Philox uniform a row; every tie is settled by the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from millrace.core.token_events import PositionLogprobs
from millrace.engine.device.copies import HostCopies, send
from millrace.engine.sampling.logit_edits import edit_logits
from millrace.engine.sampling.logprobs import position_logprobs, prompt_logprobs
from millrace.engine.sampling.masks import bar_tokens, limit_reasoning
from millrace.engine.sampling.reasoning import reasoning_of
from millrace.engine.sampling.spec import (
    PromptIds,
    SamplingRow,
    SamplingSpec,
    finish_reason,
    resumed_ids,
)
from millrace.grammar.matcher import Grammars
from millrace.grammar.source import GrammarError
from millrace_kernels import api as kernels

__all__ = [
    "NO_TOKEN",
    "Sampled",
    "Sampler",
    "SamplingRow",
    "SamplingSpec",
    "finish_reason",
    "prompt_logprobs",
]

NO_TOKEN: Final = -1
_NOT_FINITE: Final = "the model's logits are not finite (NaN or infinite); no token was chosen"
_ALL_BARRED: Final = (
    "min_tokens, logit_bias, allowed_token_ids, bad_words or a penalty leaves no token to choose "
    "from"
)
_NO_GRAMMARS: Final = "this instance can't constrain answers"
_EDITED_ELEMENTS: Final = 1 << 24  # logits that are copied at once to be edited


@dataclass(slots=True)
class Sampled:
    """One entry per row: the token id (-1 where `errors` says why there is none) and its log
    probabilities, if wanted.
    """

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)

    def fail(self, index: int, message: str) -> None:
        self.token_ids[index] = NO_TOKEN
        self.errors[index] = message


class _Settings:
    """The arguments of `kernels.sample` from each row's spec, as arrays [b]."""

    def __init__(self, specs: list[SamplingSpec]) -> None:
        self.specs = specs
        self.temperatures, self.top_p, self.min_p = (
            torch.tensor(column, dtype=torch.float64)
            for column in (
                [spec.temperature for spec in specs],
                [spec.top_p for spec in specs],
                [spec.min_p for spec in specs],
            )
        )
        self.top_k = torch.tensor([spec.top_k for spec in specs], dtype=torch.int64)
        self.is_greedy = all(spec.is_greedy for spec in specs)
        self.no_uniforms = torch.zeros(len(specs), dtype=torch.float64)

    def uniforms(self, rows: Sequence[SamplingRow], ahead: Sequence[int]) -> Tensor:
        """Returns the rows' random numbers so many tokens after their positions, float64 [b]."""
        if self.is_greedy:
            return self.no_uniforms
        drawn = [
            0.0 if row.spec.is_greedy else row.uniform(tokens)
            for row, tokens in zip(rows, ahead, strict=True)
        ]
        return torch.tensor(drawn, dtype=torch.float64)


class Sampler:
    """Keeps nothing of a sequence: the state of its output is in its `SamplingRow`.

    Without `grammars`, rows with a constraint or a budget of reasoning get errors.
    """

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._settings = _Settings([])
        self._grammars = grammars

    def row(self, spec: SamplingSpec, choice: int = 0, prompt_ids: PromptIds = None) -> SamplingRow:
        """Returns the row of a sequence without output, as `SamplingRow.first` does.

        Waits until the spec's constraint is compiled.
        """
        row = SamplingRow.first(spec, choice, prompt_ids)
        if not spec.guided:
            return row
        if self._grammars is None:
            row.error = _NO_GRAMMARS
            return row
        if spec.constraint is not None:
            row.matcher = self._grammars.matcher(spec.constraint)
        if spec.reasoning is not None:
            try:
                row.reasoning = reasoning_of(
                    spec.reasoning,
                    self._grammars.vocabulary,
                    spec.stop_token_ids,
                    constrained=spec.constraint is not None,
                )
            except GrammarError as error:
                row.error = str(error)
                return row
        for token_id in resumed_ids(spec, prompt_ids):
            row.follow(token_id)
        return row

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        """Chooses a token for each row of `logits` (float32 [b, vocab], left unchanged).

        A row with non-finite logits or nothing left to choose from gets an error and no token; the
        others are unaffected. Log probabilities are those of `logits` before any penalty, bias,
        temperature or filter.
        """
        return self.begin(logits, rows).finish()

    @torch.inference_mode()
    def begin(
        self, logits: Tensor, rows: Sequence[SamplingRow], ahead: Sequence[int] | None = None
    ) -> Sampling:
        """Enqueues the choice of `sample`; the logits must hold until `finish` where a row
        `needs_host`.

        `ahead`: the tokens of each row that are chosen on the device and not yet in its state, for
        rows that don't.
        """
        settings = self._settings_of(rows)
        uniforms = settings.uniforms(rows, ahead or [0] * len(rows))
        edited = [i for i, row in enumerate(rows) if row.edits_logits]
        temperatures = settings.temperatures
        if edited:  # of these only the peak is wanted here
            temperatures = temperatures.clone()
            temperatures[edited] = 0.0
        ids, peaks = kernels.sample(
            logits, temperatures, settings.top_k, settings.top_p, settings.min_p, uniforms
        )
        return Sampling(logits, rows, edited, settings, uniforms, ids, HostCopies(ids, peaks))

    def _settings_of(self, rows: Sequence[SamplingRow]) -> _Settings:
        """Returns the settings of the rows; kept from the step before unless rows have changed."""
        specs, settings = [row.spec for row in rows], self._settings
        if specs != settings.specs:
            settings = self._settings = _Settings(specs)
        return settings


@dataclass(frozen=True, slots=True)
class Sampling:
    """The choice of a token for each row, under way on the device."""

    logits: Tensor
    rows: Sequence[SamplingRow]
    edited: list[int]  # rows that are chosen in `finish`, from edited logits
    settings: _Settings
    uniforms: Tensor
    token_ids: Tensor  # int64 [b] on the device
    copies: HostCopies

    @torch.inference_mode()
    def finish(self) -> Sampled:
        """Waits for the tokens, and chooses those that need the host."""
        ids, peaks = self.copies.wait()
        logits, rows = self.logits, self.rows
        result = Sampled(ids.tolist(), [None] * len(rows))
        _refuse(result, range(len(rows)), peaks, _NOT_FINITE)
        edited = [i for i in self.edited if i not in result.errors]
        block = max(1, _EDITED_ELEMENTS // logits.shape[1])
        for start in range(0, len(edited), block):
            some = edited[start : start + block]
            _sample_edited(logits, rows, some, self.settings, self.uniforms, result)
        _add_logprobs(logits, rows, result)
        return result


def _sample_edited(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    edited: list[int],
    settings: _Settings,
    uniforms: Tensor,
    result: Sampled,
) -> None:
    """Fills in the tokens of the rows `edited`, from a copy of their logits."""
    index = torch.tensor(edited)
    work = logits[send(logits.device, index)]
    edit_logits(work, [rows[i] for i in edited])
    _constrain(work, rows, edited)
    columns = (settings.temperatures, settings.top_k, settings.top_p, settings.min_p, uniforms)
    ids, peaks = HostCopies(*kernels.sample(work, *(column[index] for column in columns))).wait()
    for row, token_id in zip(edited, ids.tolist(), strict=True):
        result.token_ids[row] = token_id
    _refuse(result, edited, peaks, _ALL_BARRED)
    for i in edited:
        matcher = rows[i].matcher
        if error := rows[i].error or (matcher.error if matcher is not None else ""):
            result.fail(i, error)


def _constrain(work: Tensor, rows: Sequence[SamplingRow], edited: list[int]) -> None:
    """Bars what the rows' grammars and budgets of reasoning do not allow, in float32 [k, vocab]."""
    placed = [(k, rows[i]) for k, i in enumerate(edited)]
    bar_tokens(work, [(k, row) for k, row in placed if row.is_constrained])
    limit_reasoning(work, placed)


def _refuse(result: Sampled, rows: Sequence[int], peaks: Tensor, message: str) -> None:
    for row, peak in zip(rows, peaks.tolist(), strict=True):
        if not math.isfinite(peak):
            result.fail(row, message)


def _add_logprobs(logits: Tensor, rows: Sequence[SamplingRow], result: Sampled) -> None:
    wanted = [i for i, row in enumerate(rows) if row.spec.logprobs >= 0 and i not in result.errors]
    if not wanted:
        return
    found = position_logprobs(
        logits[send(logits.device, torch.tensor(wanted))],
        [result.token_ids[i] for i in wanted],
        [rows[i].spec.logprobs for i in wanted],
    )
    for index, logprobs in zip(wanted, found, strict=True):
        result.logprobs[index] = logprobs
