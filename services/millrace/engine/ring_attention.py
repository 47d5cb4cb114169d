"""Attention round a ring of instances: whole over what all of them hold (Ring Attention, Liu et al.
2023; as Tetris section 4.1 uses it, on a zigzag).

Each member of a group has some tokens of a pass and some K/V. A layer's K/V travels round in
blocks: at step s a member attends to the block of the member s places before it, at step 0 to its
own, and merges the partial results by their log-sum-exp. Who moves the blocks is a `RingLink`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from millrace.core.kv_layout import KvLayout
from millrace.core.sequence_parallel import ChunkShares, buffer_memory, buffer_of


class RingLink(Protocol):
    """A member's place in the ring of a chunk, and who moves its blocks. For the compute thread.

    Of each layer, in this order: `history`, `publish`, then `wait` and `release` of step 1, of
    step 2 and so on. After an abort everything returns at once and moves nothing any more.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def history(self, layer: int) -> bool:
        """Waits until what others give of this layer has arrived; False after an abort."""
        ...

    def publish(self, layer: int) -> None:
        """This member's block of the layer lies in its pages, or will once the device has done
        what is queued: it may be sent on."""
        ...

    def wait(self, step: int) -> bool:
        """Waits until the block of step 1 to size - 1 has arrived; False after an abort."""
        ...

    def release(self, step: int) -> None:
        """The block's buffer may be used again, once the device has done what is queued."""
        ...


@dataclass(frozen=True, slots=True)
class KvBlock:
    """What a member sees of a share of K/V at a step of the ring, the same in every layer.

    pages: int32 [p], in the share's order. At step 0 page ids; at later steps pages of the pool's
    storage seen as [layers * pages, ...], where the block lies in a buffer. positions: int32
    [slots], slots <= p * page_tokens: the token in each slot, PAD where there is none.
    """

    pages: Tensor
    positions: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class RingTask:
    """What one member computes of a pass of a group. Tensors lie on the host.

    token_ids, positions: int64 [n], in ascending order; n may be 0. slots: int64 [n], page id *
    page_tokens + row of each token's K/V. ``blocks[s]``: what is attended to at step s, of as
    many as the group has members. With `last_layer` some member wants rows of this pass, so that
    the last layer's attention goes round too; all members say the same. `want_logits` (of the
    member's last token), `want_prompt_logprobs`, `logits` and `hidden` are this member's, as in
    `PrefillTask`.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    blocks: Sequence[KvBlock]
    link: RingLink
    last_layer: bool = True
    want_logits: bool = False
    want_prompt_logprobs: bool = False
    logits: Tensor | None = None
    hidden: Tensor | None = None

    @property
    def wants_rows(self) -> bool:
        """Whether this member goes on past the last layer's attention."""
        return self.want_logits or self.want_prompt_logprobs


def ring_task(
    shares: ChunkShares,
    number: int,
    link: RingLink,
    *,
    prompt_ids: Tensor,
    pages: Sequence[int],
    buffers: Sequence[Sequence[int]],
    layout: KvLayout,
    last_layer: bool,
    want_logits: bool = False,
    want_prompt_logprobs: bool = False,
) -> RingTask:
    """The task of rank ``link.rank`` in ``shares.passes[number]``.

    prompt_ids: int64 [prompt tokens]; ``pages``: the page ids that the request has at this member,
    in the order in which it took them; ``buffers``: those lent to each of the ring's buffers.
    """
    now, share = shares.passes[number], shares.shares[link.rank]
    runs = now.runs[link.rank]
    tokens = [torch.arange(run.start_token, run.start_token + run.num_tokens) for run in runs]
    places = [torch.arange(run.slot, run.slot + run.num_tokens) for run in runs]
    none = torch.empty(0, dtype=torch.int64)
    positions, place = torch.cat([none, *tokens]), torch.cat([none, *places])
    own = torch.tensor([pages[page] for page in share.pages], dtype=torch.int32)
    page_tokens = layout.page_tokens
    blocks = [_block(own, shares, now.filled, link.rank, page_tokens)]
    memory = [
        torch.tensor(buffer_memory(b, layout.num_layers, layout.num_pages), dtype=torch.int32)
        for b in buffers
    ]
    for step in range(1, link.size):
        rank = (link.rank - step) % link.size
        blocks.append(_block(memory[buffer_of(step)], shares, now.filled, rank, page_tokens))
    return RingTask(
        token_ids=prompt_ids[positions],
        positions=positions,
        slots=own.long()[place // page_tokens] * page_tokens + place % page_tokens,
        blocks=blocks,
        link=link,
        last_layer=last_layer,
        want_logits=want_logits,
        want_prompt_logprobs=want_prompt_logprobs,
    )


def _block(
    pages: Tensor, shares: ChunkShares, filled: Sequence[int], rank: int, page_tokens: int
) -> KvBlock:
    """What rank `rank` has used of its share, where it lies in `pages`."""
    slots = filled[rank]
    positions = torch.tensor(shares.shares[rank].positions[:slots], dtype=torch.int32)
    return KvBlock(pages[: -(-slots // page_tokens)], positions)
