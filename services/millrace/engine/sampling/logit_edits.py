"""Changes to the model's logits before a token is chosen: penalties, `logit_bias`, barred tokens.

Only the entries concerned are touched: they are addressed by flat index, all rows of a batch in
one gather and scatter, so the work grows with the distinct tokens a sequence has seen and not with
its length or the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.engine.device.copies import send
from millrace.engine.sampling.spec import SamplingRow

_RowIds = tuple[int, npt.NDArray[np.int64]]


def edit_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Applies each row's penalties, bias, `allowed_token_ids`, `bad_words` and `min_tokens` to
    `logits` (float32 [b, vocab], contiguous) in place.

    Repetition penalty as in Keskar et al., "CTRL", section 4.1, with the sign rule that
    `transformers` uses (a negative logit is multiplied); presence and frequency penalties as
    OpenAI's API reference defines them.
    """
    vocab = logits.shape[1]
    flat = logits.view(-1)
    _penalise(flat, rows, vocab)
    biased = [(k, *row.spec.bias) for k, row in enumerate(rows) if row.spec.logit_bias]
    if biased:
        where, inside = _flat_index([(k, ids) for k, ids, _ in biased], vocab)
        values = np.concatenate([values for _, _, values in biased])[inside]
        flat.index_add_(0, _on(flat, where), _on(flat, values))
    _keep_allowed(logits, rows)
    barred = [(k, row.spec.stop_id_array) for k, row in enumerate(rows) if _bars(row)]
    barred += [(k, row.bad_words.barred()) for k, row in enumerate(rows) if row.bad_words]
    if barred:
        where, _ = _flat_index(barred, vocab)
        flat.index_fill_(0, _on(flat, where), -math.inf)


def _keep_allowed(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Bars all tokens but `allowed_token_ids` in the rows that have some."""
    specs = [row.spec for row in rows]
    limited = [(k, spec.allowed_id_array) for k, spec in enumerate(specs) if spec.allowed_token_ids]
    if not limited:
        return
    flat = logits.view(-1)
    where = _on(flat, _flat_index(limited, logits.shape[1])[0])
    kept = flat[where]
    logits.index_fill_(0, torch.tensor([k for k, _ in limited], device=logits.device), -math.inf)
    flat[where] = kept


def _bars(row: SamplingRow) -> bool:
    """Returns whether stop ids are barred here; `masks` does it where a grammar may force them."""
    return row.bars_stop_ids and row.matcher is None


def _penalise(flat: Tensor, rows: Sequence[SamplingRow], vocab: int) -> None:
    counted = [(k, row.spec, row.counts) for k, row in enumerate(rows) if row.counts is not None]
    if not counted:
        return
    where, inside = _flat_index([(k, counts.ids) for k, _, counts in counted], vocab)
    sizes = [len(counts.ids) for _, _, counts in counted]
    settings = np.array(
        [
            (spec.repetition_penalty, spec.presence_penalty, spec.frequency_penalty)
            for _, spec, _ in counted
        ],
        dtype=np.float32,
    )
    repetition, presence, frequency = np.repeat(settings, sizes, axis=0).T
    output = np.concatenate([counts.output for _, _, counts in counted])
    lowered = presence * (output > 0) + frequency * output

    index, factor = _on(flat, where), _on(flat, repetition[inside])
    values = flat[index]
    values = torch.where(values > 0, values / factor, values * factor)
    flat[index] = values - _on(flat, lowered[inside])


def _flat_index(
    per_row: Sequence[_RowIds], vocab: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Flat indices into [b, vocab] of (row, ids) pairs, and which of the ids are in the vocabulary
    at all.
    """
    ids = np.concatenate([ids for _, ids in per_row])
    starts = np.repeat([k * vocab for k, _ in per_row], [len(ids) for _, ids in per_row])
    inside = (ids >= 0) & (ids < vocab)
    return (starts + ids)[inside], inside


def _on(like: Tensor, array: npt.NDArray[np.generic]) -> Tensor:
    return send(like.device, torch.from_numpy(array))
