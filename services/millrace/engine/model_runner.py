"""Runs a model over the paged KV pool: prefill operator by operator, decode a step at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from millrace.engine.kv_pool import KvPool
    from millrace.engine.loader import Model


@dataclass(frozen=True, slots=True)
class Boundary:
    """A point between two operators, named by the operator that has just run.

    ``layer`` is -1 after ``embed`` and `num_layers` after ``lm_head``.
    """

    layer: int
    operator: str


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillTask:
    """One chunk of one prompt.

    ``token_ids``: int64 [L] of this chunk; ``history_tokens`` of the prompt came before it and lie
    in ``pages`` (all pages of the request, in order) already. After the last operator ``logits``
    is float32 [vocab] of the chunk's last position when ``want_logits``, and ``prompt_logits``
    float32 [L, vocab] of every position when ``want_prompt_logprobs``.
    """

    token_ids: torch.Tensor
    history_tokens: int
    pages: Sequence[int]
    want_logits: bool = True
    want_prompt_logprobs: bool = False
    logits: torch.Tensor | None = None
    prompt_logits: torch.Tensor | None = None


class ModelRunner:
    """A model bound to a KV pool."""

    def __init__(self, model: Model, pool: KvPool, attention_backend: str = "auto") -> None:
        raise NotImplementedError

    def prefill(self, task: PrefillTask) -> Iterator[Boundary]:
        """`prefill_batch` of one task."""
        return self.prefill_batch([task])

    def prefill_batch(self, tasks: Sequence[PrefillTask]) -> Iterator[Boundary]:
        """Computes a ragged batch of chunks, yielding after every operator.

        The KV of a layer is in its pages once ``attn`` of that layer was yielded. The caller may
        stop at any boundary (`close()`), or leave the generator suspended, run others, and go on.
        """
        raise NotImplementedError

    def decode(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
    ) -> torch.Tensor:
        """One token of each of b sequences: writes its KV, attends to all `kv_lens` rows.

        ``token_ids`` int64 [b]; ``positions`` int64 [b]; ``page_table`` int32 [b, max_pages];
        ``kv_lens`` int32 [b], the new token included. Returns float32 [b, vocab].
        """
        raise NotImplementedError
