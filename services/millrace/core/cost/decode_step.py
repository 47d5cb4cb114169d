"""The duration of a decode step, as the instance registers it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStepTime:
    """Seconds = base + per_sequence n + per_context_token C: n sequences, C their context tokens in
    total.

    A step reads the weights once, and all KV (Mnemosyne section 4.4)."""

    base_s: float
    per_sequence_s: float
    per_context_token_s: float

    @staticmethod
    def of(terms: tuple[float, float, float]) -> DecodeStepTime:
        """Builds the equation from its coefficients, in its order."""
        base_s, per_sequence_s, per_context_token_s = terms
        return DecodeStepTime(
            base_s=base_s, per_sequence_s=per_sequence_s, per_context_token_s=per_context_token_s
        )

    def __str__(self) -> str:
        return (
            f"decode steps: {1e3 * self.base_s:.3g} ms, {1e6 * self.per_sequence_s:.3g} us a "
            f"sequence, {1e6 * self.per_context_token_s:.3g} us a token of context"
        )

    def seconds(self, sequences: int, context_tokens: int) -> float:
        return (
            self.base_s
            + self.per_sequence_s * sequences
            + self.per_context_token_s * context_tokens
        )
