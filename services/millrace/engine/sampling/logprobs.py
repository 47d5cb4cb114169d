"""Log probabilities under the model itself, and the order of tokens that all of sampling shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from millrace.core.token_events import PositionLogprobs
from millrace.engine.device.copies import HostCopies, send
from millrace_kernels.torch_backend.sampling import ranked

_SPARE: Final = (
    32  # candidates beyond those wanted, so that a tie at the edge rarely costs a full sort
)


def top_tokens(logits: Tensor, count: int) -> Tensor:
    """Returns the ids [b, count] of the largest of float32 [b, vocab] logits, equal ones by lowest
    id, always exactly.
    """
    vocab = logits.shape[-1]
    values, ids = ranked(logits, min(count + _SPARE, vocab))
    unsure = torch.nonzero(values[:, count - 1] == values[:, -1]).squeeze(1)
    if len(unsure) and values.shape[1] < vocab:
        ids[unsure] = ranked(logits[unsure], vocab)[1][:, : ids.shape[1]]
    return ids[:, :count]


def position_logprobs(
    logits: Tensor, chosen: Sequence[int], top: Sequence[int]
) -> list[PositionLogprobs]:
    """Returns log probabilities of the unprocessed model distribution: log-softmax of `logits`, no
    more.

    `logits` is float32 [b, vocab], `chosen` b token ids, `top` how many of the likeliest each
    position wants (0: none; more than the vocabulary: all of it).
    """
    if not chosen:
        return []
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    ids = send(logits.device, torch.tensor(chosen, dtype=torch.int64)).unsqueeze(1)
    count = min(max(top), logits.shape[-1])
    if count > 0:
        ids = torch.cat((ids, top_tokens(logits, count)), dim=1)
    values, ids = HostCopies(logits.gather(1, ids) - normaliser, ids).wait()
    return [
        PositionLogprobs(
            (row_ids[0], row[0]), list(zip(row_ids[1 : k + 1], row[1 : k + 1], strict=True))
        )
        for row_ids, row, k in zip(ids.tolist(), values.tolist(), top, strict=True)
    ]


def prompt_logprobs(logits: Tensor, targets: Tensor, top: int) -> list[PositionLogprobs]:
    """Returns the log probabilities of prompt tokens `targets` int64 [L], given the float32 [L,
    vocab] logits of the position before each.
    """
    return position_logprobs(logits, targets.tolist(), [top] * len(targets))
