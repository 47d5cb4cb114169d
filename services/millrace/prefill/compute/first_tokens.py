"""Samples a prompt's first tokens and computes its log-probabilities, on the compute thread."""

from __future__ import annotations

from typing import Final, Protocol

import torch

from millrace.core.instance.group import PromptLogprobsRun
from millrace.core.token_events import FirstToken, PositionLogprobs
from millrace.engine.sampling.logprobs import position_logprobs
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.sampling.spec import SamplingSpec

LOGPROB_BLOCK_TOKENS: Final = 256


class SamplingError(RuntimeError):
    """Raised when no token can be sampled for a request, at any instance."""


class Projecting(Protocol):
    """The part of `ModelRunner` that prompt log-probabilities need."""

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 [n, vocab]: the logits of rows [n, hidden_size]."""


def sample_first(
    sampler: Sampler, spec: SamplingSpec, prompt_ids: torch.Tensor, logits: torch.Tensor
) -> tuple[FirstToken, ...]:
    """Samples the first token of every choice. Raises SamplingError if none can be sampled.

    prompt_ids: int64 [prompt_tokens] on the CPU; logits: float32 [vocab] of the last position.
    """
    seen = prompt_ids.numpy() if spec.needs_prompt_ids else None
    rows = [sampler.row(spec, choice, seen) for choice in range(spec.n)]
    sampled = sampler.sample(logits.expand(spec.n, -1), rows)
    if sampled.errors:
        raise SamplingError(next(iter(sampled.errors.values())))
    return tuple(map(FirstToken, sampled.token_ids, sampled.logprobs))


def prompt_logprobs(
    runner: Projecting, top: int, prompt_ids: torch.Tensor, start: int, hidden: torch.Tensor
) -> PromptLogprobsRun:
    """Computes the log-probabilities of the prompt's own tokens, in blocks of bounded memory.

    prompt_ids: int64 [prompt_tokens] on the CPU; hidden: [L, hidden_size] of the positions from
    `start` on. Each gives the probability of the next id, and the `top` most probable ids.
    """
    found: list[PositionLogprobs] = []
    for first in range(0, len(hidden), LOGPROB_BLOCK_TOKENS):
        rows = hidden[first : first + LOGPROB_BLOCK_TOKENS]
        after = start + first + 1
        targets = prompt_ids[after : after + len(rows)].tolist()
        logits = runner.project(rows[: len(targets)])
        found += position_logprobs(logits, targets, [top] * len(targets))
    return PromptLogprobsRun(start_token=start, positions=tuple(found))
