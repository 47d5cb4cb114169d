"""A predictor of mixed batches with quadratic attention, and requests to pack, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.core.cost.operators import BatchShape


@dataclass(frozen=True)
class Prompt:
    """A request as packing sees one."""

    name: str
    prompt_tokens: int
    rho: float = 0.0  # its relative slack


@dataclass
class Quadratic:
    """Linear layers floored by their weights' reads, attention of chunks and of decodes.

    The defaults: 1 ms however small the batch, 10 us a token beyond that, and 1 ns for every pair
    of a new token with a token that it attends to.
    """

    floor_s: float = 1e-3
    token_s: float = 1e-5
    pair_s: float = 1e-9
    asked: list[BatchShape] = field(default_factory=list)

    def pass_s(self, batch: BatchShape) -> float:
        self.asked.append(batch)
        tokens = batch.decodes + sum(n for n, _ in batch.prefills)
        pairs = batch.decode_context_tokens + sum(n * h + n * n / 2 for n, h in batch.prefills)
        return max(self.floor_s, self.token_s * tokens) + self.pair_s * pairs


def rho_of(prompt: Prompt) -> float:
    return prompt.rho


def shape(
    packed: list[tuple[Prompt, int]],
    done: dict[str, int],
    decodes: int = 0,
    decode_context_tokens: int = 0,
) -> BatchShape:
    """What the model would be asked about `packed`; `done` tokens by name."""
    return BatchShape(
        prefills=tuple((tokens, done[prompt.name]) for prompt, tokens in packed),
        decodes=decodes,
        decode_context_tokens=decode_context_tokens,
    )
