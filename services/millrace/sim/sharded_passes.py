"""Forward passes whose prefills are spread over KVP workers (Mnemosyne section 4.4)."""

from __future__ import annotations

from millrace.core.operators import BatchShape, OperatorModel


class ShardedPasses:
    """Predicts passes for packing with every prefill's history on as many workers as it takes."""

    def __init__(self, operators: OperatorModel, shard_tokens: int, workers: int) -> None:
        self._operators = operators
        self._shard_tokens = shard_tokens
        self._workers = workers

    def pass_s(self, batch: BatchShape) -> float:
        shard, workers = self._shard_tokens, self._workers
        degrees = [min(-(-sum(part) // shard), workers) for part in batch.prefills]
        return spread_pass_s(self._operators, batch, degrees)


def spread_pass_s(operators: OperatorModel, batch: BatchShape, degrees: list[int]) -> float:
    """Seconds of a pass whose prefills are each spread over workers of their own number.

    The operator model knows one degree for all: histories are stretched so that each part of one
    is as long as it is.
    """
    degree = max(degrees, default=1)
    if degree > 1:
        stretched = tuple(
            (tokens, history * degree // own)
            for (tokens, history), own in zip(batch.prefills, degrees, strict=True)
        )
        batch = BatchShape(
            prefills=stretched,
            decodes=batch.decodes,
            decode_context_tokens=batch.decode_context_tokens,
        )
    return operators.pass_s(batch, degree)
