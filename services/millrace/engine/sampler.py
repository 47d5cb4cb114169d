"""Chooses the next token of every sequence of a batch.

Order of work on a row's logits: repetition penalty over prompt and output (divide if positive,
multiply if negative), presence and frequency penalties over the output, `logit_bias`, stop ids
barred below `min_tokens`; then greedy choice, or temperature, `top_k`, `top_p` of what is left,
`min_p` relative to the likeliest, and a draw from what remains.

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

from millrace.engine.filtered_draw import draw_filtered, invert, softmax_weights
from millrace.engine.logit_edits import edit_logits
from millrace.engine.logprobs import PositionLogprobs, position_logprobs, prompt_logprobs
from millrace.engine.sampling_spec import SamplingRow, SamplingSpec, finish_reason

__all__ = [
    "NO_TOKEN",
    "PositionLogprobs",
    "Sampled",
    "Sampler",
    "SamplingRow",
    "SamplingSpec",
    "finish_reason",
    "prompt_logprobs",
]

NO_TOKEN: Final = -1
_NOT_FINITE: Final = "the model's logits are not finite (NaN or infinite); no token was chosen"
_ALL_BARRED: Final = "min_tokens, logit_bias or a penalty leaves no token to choose from"
# Logits worked on at once: on a CPU, what stays in its caches.
_BLOCK_ELEMENTS: Final = {"cpu": 1 << 19, "cuda": 1 << 26}


@dataclass(slots=True)
class Sampled:
    """One entry a row: the token id (-1 where `errors` says why there is none) and its log
    probabilities, if wanted.
    """

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)

    def fail(self, index: int, message: str) -> None:
        self.token_ids[index] = NO_TOKEN
        self.errors[index] = message


class Sampler:
    """Stateless: what a sequence has put out so far is in its `SamplingRow`."""

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        """Chooses a token for each row of `logits` (float32 [b, vocab], left unchanged).

        A row with non-finite logits or nothing left to choose from gets an error and no token; the
        others are unaffected. Log probabilities are those of `logits` as they came, before any
        penalty, bias, temperature or filter.
        """
        peaks, best = logits.max(dim=-1)  # of equal logits the first, i.e. the lowest id; NaN wins
        result = Sampled(best.tolist(), [None] * len(rows))
        for index, peak in enumerate(peaks.tolist()):
            if not math.isfinite(peak):
                result.fail(index, _NOT_FINITE)
        open_rows = [
            i
            for i, row in enumerate(rows)
            if (row.edits_logits or not row.spec.is_greedy) and i not in result.errors
        ]
        block = max(1, _BLOCK_ELEMENTS.get(logits.device.type, 1 << 19) // logits.shape[1])
        for start in range(0, len(open_rows), block):
            _choose(logits, rows, open_rows[start : start + block], result)
        _add_logprobs(logits, rows, result)
        return result


def _choose(
    logits: Tensor, rows: Sequence[SamplingRow], open_rows: list[int], result: Sampled
) -> None:
    """Fills in the tokens of `open_rows`, those for which the plain argmax is not the answer."""
    chosen_rows = [rows[i] for i in open_rows]
    work = logits[torch.tensor(open_rows, device=logits.device)]
    edit_logits(work, chosen_rows)
    peaks, best = work.max(dim=-1)
    plain = [k for k, r in enumerate(chosen_rows) if not (r.spec.is_greedy or r.spec.is_filtered)]
    filtered = [k for k, r in enumerate(chosen_rows) if r.spec.is_filtered and not r.spec.is_greedy]
    for picked, draw in ((plain, _draw_plain), (filtered, draw_filtered)):
        if picked:
            index = torch.tensor(picked, device=work.device)
            drawn_rows = [chosen_rows[k] for k in picked]
            specs = [row.spec for row in drawn_rows]
            uniforms = torch.tensor([row.uniform for row in drawn_rows], dtype=torch.float64)
            best[index] = draw(work[index], uniforms.unsqueeze(1).to(work.device), specs)
    for row_index, token_id, peak in zip(open_rows, best.tolist(), peaks.tolist(), strict=True):
        result.token_ids[row_index] = token_id
        if not math.isfinite(peak):
            result.fail(row_index, _ALL_BARRED)


def _draw_plain(logits: Tensor, uniforms: Tensor, specs: Sequence[SamplingSpec]) -> Tensor:
    """Ids int64 [b] drawn from float32 [b, vocab] by temperature alone; `uniforms` float64 [b,
    1].
    """
    peaks = logits.amax(dim=-1, keepdim=True)
    cumulative = softmax_weights(logits, peaks, specs).cumsum(dim=-1)
    return invert(cumulative, uniforms, cumulative[:, -1:]).squeeze(1)


def _add_logprobs(logits: Tensor, rows: Sequence[SamplingRow], result: Sampled) -> None:
    wanted = [i for i, row in enumerate(rows) if row.spec.logprobs >= 0 and i not in result.errors]
    if not wanted:
        return
    found = position_logprobs(
        logits[torch.tensor(wanted, device=logits.device)],
        [result.token_ids[i] for i in wanted],
        [rows[i].spec.logprobs for i in wanted],
    )
    for index, logprobs in zip(wanted, found, strict=True):
        result.logprobs[index] = logprobs
