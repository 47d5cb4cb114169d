"""The rows that one prompt has in a forward pass: an argument of the engine's generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.core.kv.kvp_pass import RemoteShard
from millrace.engine.attention.ring import RingTask
from millrace.engine.kv.step_tables import Pages


def _nothing(layer: int) -> None:
    """Ignores the report: in one stage a pass reports every layer by a boundary."""


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillTask:
    """The rows of one chunk in a pass of the engine's generator (`Runner.prefill_batch`).

    ``token_ids``: int64 [L] of this chunk, L at least 1; ``history_tokens`` of the prompt came
    before it and lie in ``pages`` (all pages of the request, in order) already. After the last
    operator ``logits`` is float32 [vocab] of the chunk's last position when ``want_logits``, and
    ``hidden`` [L, hidden_size] of every position, after the final norm, when ``want_hidden``:
    for `Runner.project` (logits of a whole chunk would not fit beside a large vocabulary), or to be
    pooled.

    With ``shards`` KVP workers hold the K/V from the first shard on, and ``pages`` hold the K/V
    before it. After the pass ``lost`` says why a shard was lost, if one was: then logits and hidden
    are wrong.

    In several stages `InFlight.order` and `drop` use ``name``, which all passes of a prompt share.
    ``on_layer`` is called, on another thread, when the KV of a later stage's layer (counted over
    the whole model) is in its pages. With ``awaits_kv`` the generator ends after the last layer's
    call, even where the pass gives no rows.
    """

    token_ids: Tensor
    history_tokens: int
    pages: Pages
    want_logits: bool = True
    want_hidden: bool = False
    shards: Sequence[RemoteShard] = ()
    lost: str = ""
    name: str = ""
    on_layer: Callable[[int], None] = _nothing
    awaits_kv: bool = False
    logits: Tensor | None = None
    hidden: Tensor | None = None

    @property
    def kv_tokens(self) -> int:
        """Returns the tokens of KV after this chunk has run."""
        return self.history_tokens + len(self.token_ids)

    @property
    def own_tokens(self) -> int:
        """Returns how many of `kv_tokens` lie in `pages`."""
        return min(self.kv_tokens, self.shards[0].start_token) if self.shards else self.kv_tokens

    @property
    def is_spread(self) -> bool:
        """Returns whether rows of the chunk need KVP workers."""
        return self.own_tokens < self.kv_tokens


def hand_out(
    tasks: Sequence[PrefillTask | RingTask],
    logits: Iterator[Tensor],
    hidden: Tensor | None,
    start: int = 0,
) -> None:
    """Gives every task the rows it asked for, of a pass in which their rows begin at `start`.

    logits: float32 [vocab] of each row that is wanted, in order; hidden: [n, hidden_size] or None,
    of all rows.
    """
    end = start
    for task in tasks:
        begin, end = end, end + len(task.token_ids)
        if task.want_logits:
            task.logits = next(logits)
        if task.want_hidden and hidden is not None:
            task.hidden = hidden[begin:end]


def check_tasks(tasks: Sequence[PrefillTask], page_tokens: int) -> None:
    """Raises ValueError when there is no task, or one has no tokens or too few pages."""
    if not tasks:
        raise ValueError("a pass over prompts needs at least one task")
    for task in tasks:
        if task.token_ids.dtype != torch.int64 or task.token_ids.dim() != 1:
            raise ValueError("PrefillTask.token_ids must be int64 with one dimension")
        if not len(task.token_ids) or task.history_tokens < 0:
            raise ValueError("a PrefillTask needs at least one token and no negative history")
        if len(task.pages) * page_tokens < task.own_tokens:
            raise ValueError(
                f"{len(task.pages)} pages of {page_tokens} tokens can't hold {task.own_tokens}"
            )
