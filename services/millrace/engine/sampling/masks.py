"""Bars the tokens that the grammars and the budgets of reasoning of a batch do not allow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from millrace.core.arithmetic import ceil_div
from millrace.engine.device.copies import send
from millrace.engine.sampling.spec import Ids, SamplingRow
from millrace.grammar.matcher import Mask


def bar_tokens(logits: Tensor, rows: Sequence[tuple[int, SamplingRow]]) -> None:
    """Sets logits of tokens that a row's matcher does not allow to -inf, in place.

    `logits` is float32 [b, vocab]; `rows` are an index into it and the row there, in ascending
    order. Below `min_tokens` stop ids are barred, too, unless the grammar allows nothing else. One
    bit a token crosses to the device, and is unpacked there.
    """
    if not rows:
        return
    vocab = logits.shape[1]
    masks = np.zeros((len(rows), ceil_div(vocab, 32)), dtype=np.uint32)
    matchers = [row.matcher for _, row in rows if row.matcher is not None]
    for matcher in matchers[1:]:  # those that did not begin when their last token came
        matcher.begin_mask()
    for mask, matcher in zip(masks, matchers, strict=True):
        mask[:] = matcher.mask()
    for (_, row), mask in zip(rows, masks, strict=True):
        if row.reasoning is not None:
            for token_id in row.reasoning.also:
                mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        if row.bars_stop_ids:
            _bar_stop_ids(mask, row.spec.stop_id_array)
    barred = _unpacked(~masks, logits.device)[:, :vocab]
    if len(rows) == len(logits):  # all of them, in their order
        logits.masked_fill_(barred, -math.inf)
        return
    index = send(logits.device, torch.tensor([index for index, _ in rows]))
    logits[index] = logits[index].masked_fill_(barred, -math.inf)


def limit_reasoning(logits: Tensor, rows: Sequence[tuple[int, SamplingRow]]) -> None:
    """Bars the tokens that end the reasoning wrongly, and all but those that must end it.

    Arguments as those of `bar_tokens`. A token that must come is chosen whatever else bars it.
    """
    for index, row in rows:
        reasoning = row.reasoning
        if reasoning is None:
            continue
        if reasoning.barred:
            logits[index, list(reasoning.barred)] = -math.inf
        if reasoning.only:
            ids = list(reasoning.only)
            kept = logits[index, ids].nan_to_num(neginf=torch.finfo(logits.dtype).min)
            logits[index] = -math.inf
            logits[index, ids] = kept


def _bar_stop_ids(mask: Mask, stop_ids: Ids) -> None:
    left = mask.copy()
    inside = stop_ids[(stop_ids >= 0) & (stop_ids < 32 * len(mask))]
    bits = np.left_shift(np.uint32(1), (inside & 31).astype(np.uint32))
    np.bitwise_and.at(left, inside >> 5, ~bits)
    if left.any():
        mask[:] = left


def _unpacked(masks: Mask, device: torch.device) -> Tensor:
    """Returns bool [b, 32 * words] on the device."""
    if device.type == "cpu":
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    packed = send(device, torch.from_numpy(masks.view(np.uint8)))
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)
