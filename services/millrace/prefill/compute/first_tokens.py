"""What comes of a prompt's last row, token one of every choice, and of its rows, log-probabilities.

On the compute thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch

from millrace.core.token_events import PositionLogprobs
from millrace.engine.sampling.logprobs import position_logprobs
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.sampling.spec import SamplingRow, SamplingSpec

LOGPROB_BLOCK_TOKENS: Final = 256

#: Log probabilities of neighbouring positions, and the first of these.
LogprobsRun = tuple[int, list[PositionLogprobs]]


@dataclass(slots=True)
class PrefillOutcome:
    """Token one of each choice with its log-probabilities."""

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None]


class SamplingError(RuntimeError):
    """No token can be chosen for a request, here or anywhere."""


class Projecting(Protocol):
    """What prompt log-probabilities need of `ModelRunner`."""

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab]: logits of rows [n, hidden_size]."""


def sample_first(
    sampler: Sampler, spec: SamplingSpec, prompt_ids: torch.Tensor, logits: torch.Tensor
) -> PrefillOutcome:
    """Token one of every choice. Raises SamplingError where none comes.

    prompt_ids: int64 [prompt_tokens] on the CPU; logits: float32 [vocab] of the last position.
    """
    seen = prompt_ids.numpy() if spec.needs_prompt_ids else None
    rows = [SamplingRow.first(spec, choice, seen) for choice in range(spec.n)]
    sampled = sampler.sample(logits.expand(spec.n, -1), rows)
    if sampled.errors:
        raise SamplingError(next(iter(sampled.errors.values())))
    return PrefillOutcome(sampled.token_ids, sampled.logprobs)


def prompt_logprobs(
    runner: Projecting, top: int, prompt_ids: torch.Tensor, start: int, hidden: torch.Tensor
) -> LogprobsRun:
    """Log probabilities of the prompt's own tokens, in blocks of bounded memory.

    prompt_ids: int64 [prompt_tokens] on the CPU; hidden: [L, hidden_size] of the positions from
    `start` on. Each says the likeliness of the next id; `top` of the likeliest are told of each.
    """
    found: list[PositionLogprobs] = []
    for first in range(0, len(hidden), LOGPROB_BLOCK_TOKENS):
        rows = hidden[first : first + LOGPROB_BLOCK_TOKENS]
        after = start + first + 1
        targets = prompt_ids[after : after + len(rows)].tolist()
        logits = runner.project(rows[: len(targets)])
        found += position_logprobs(logits, targets, [top] * len(targets))
    return start, found
