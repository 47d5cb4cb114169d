"""Predicts forward passes whose prompts' KV lies in shards at several workers (Mnemosyne section
4.4).

Shards as the scheduler makes them fill up one after another (`core.kv.kvp_shards`), so a pass takes
as long as the longest part of a history at one worker. Mnemosyne's own figures assume equal parts
(`ShardedPasses`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from millrace.core.arithmetic import ceil_div
from millrace.core.cost.operators import BatchShape, OperatorModel
from millrace.core.kv.kvp_shards import Reservation, degree


class ShardedPasses:
    """Predicts passes for packing with every prefill's history on as many workers as it needs."""

    def __init__(self, operators: OperatorModel, shard_tokens: int, workers: int) -> None:
        self._operators = operators
        self._shard_tokens = shard_tokens
        self._workers = workers

    def pass_s(self, batch: BatchShape) -> float:
        shard, workers = self._shard_tokens, self._workers
        degrees = [min(ceil_div(sum(part), shard), workers) for part in batch.prefills]
        return spread_pass_s(self._operators, batch, degrees)


class LimitedPasses:
    """Predicts passes for packing where no worker has more than `shard_tokens` of a prompt."""

    def __init__(self, operators: OperatorModel, shard_tokens: int) -> None:
        self._operators = operators
        self._shard_tokens = shard_tokens

    def pass_s(self, batch: BatchShape) -> float:
        most = self._shard_tokens
        parts = [min(history, most) for _, history in batch.prefills]
        degrees = [degree(sum(chunk), most) for chunk in batch.prefills]
        return filled_pass_s(self._operators, batch, parts, degrees)


def filled_pass_s(
    operators: OperatorModel, batch: BatchShape, parts: Sequence[int], degrees: list[int]
) -> float:
    """The seconds of a pass whose prefills are each spread over their own number of workers.

    parts: of each history, tokens at the worker that has most of it.
    """
    level = tuple(
        (tokens, part * own)
        for (tokens, _), part, own in zip(batch.prefills, parts, degrees, strict=True)
    )
    as_if_alike = BatchShape(
        prefills=level, decodes=batch.decodes, decode_context_tokens=batch.decode_context_tokens
    )
    return spread_pass_s(operators, as_if_alike, degrees)


def spread_pass_s(operators: OperatorModel, batch: BatchShape, degrees: list[int]) -> float:
    """The seconds of a pass whose prefills are each spread evenly over their own number of workers.

    The operator model takes one degree for all: histories are scaled so that one part of each, at
    that degree, has its true length.
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


def held(spread: Reservation, context: float) -> list[tuple[str, float]]:
    """Returns (worker, tokens) of each worker that has some of the first `context` tokens, by
    position.
    """
    return [
        (shard.worker_id, min(context, shard.end_token) - shard.start_token)
        for shard in spread.shards[: spread.degree(math.ceil(context))]
    ]
