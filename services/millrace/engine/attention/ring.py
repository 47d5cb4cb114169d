"""Attention round a ring of instances over the K/V of all of them (Ring Attention, Liu et al. 2023;
as Tetris section 4.1 uses it, on a zigzag).

Each member of a group has some tokens of a pass and some K/V. A layer's K/V travels round in
blocks: at step s a member attends to the block of the member s places before it, at step 0 to its
own, and merges the partial results by their log-sum-exp. A `RingLink` moves the blocks.

Where results are to have the same bits as without a group (`engine.deterministic=on`), a member
gathers a layer's blocks in the order of the tokens and attends to all of them at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.core.arithmetic import ceil_div
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import PAD, ChunkShares, buffer_memory, buffer_of
from millrace_kernels import api as kernels
from millrace_kernels import determinism
from millrace_kernels.plan import AttentionPlan

IntArray = NDArray[np.int64]


class RingLink(Protocol):
    """A member's place in the ring of a chunk; moves its blocks. For the compute thread.

    Calls for each layer, in this order: `history`, `publish`, then `wait` and `release` of step 1,
    of step 2 and so on. After an abort every call returns at once and moves nothing any more.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def history(self, layer: int) -> bool:
        """Waits until the history that other members give of this layer has arrived; False after an
        abort.
        """
        ...

    def publish(self, layer: int) -> None:
        """Notes that this member's block of the layer lies in its pages, or will once the device
        has done its queued work: the block may be sent."""
        ...

    def wait(self, step: int) -> bool:
        """Waits until the block of step 1 to size - 1 has arrived; False after an abort."""
        ...

    def release(self, step: int) -> None:
        """Allows the block's buffer to be used again, once the device has done its queued work."""
        ...


@dataclass(frozen=True, slots=True)
class KvBlock:
    """The share of K/V that a member sees at a step of the ring, the same in every layer.

    pages: int32 [p], in the share's order. At step 0 page ids; at later steps pages of the pool's
    storage seen as [layers * pages, ...], where the block lies in a buffer; at a stage with a pool
    of its own, the pool of the stage. positions: int32
    [slots], slots <= p * page_tokens: the token in each slot, PAD where there is none.
    """

    pages: Tensor
    positions: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class RingTask:
    """One member's rows in a group's pass of the engine's generator (`Runner.prefill_ring`).
    Tensors lie on the host.

    token_ids, positions: int64 [n], in ascending order; n may be 0. slots: int64 [n], page id *
    page_tokens + row of each token's K/V. ``blocks[s]``: the block of step s; as many as the group
    has members. With `last_layer` some member wants rows of this pass, so that the last layer's
    attention goes round too; all members have the same value. `want_logits` (of the member's last
    token), `want_hidden`, `name`, `logits` and `hidden` are this member's, as in
    `PrefillTask`.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    blocks: Sequence[KvBlock]
    link: RingLink
    last_layer: bool = True
    want_logits: bool = False
    want_hidden: bool = False
    name: str = ""
    logits: Tensor | None = None
    hidden: Tensor | None = None

    @property
    def wants_rows(self) -> bool:
        """Returns whether this member continues past the last layer's attention."""
        return self.want_logits or (self.want_hidden and len(self.token_ids) > 0)

    def check(self) -> None:
        """Raises ValueError when the fields don't fit each other."""
        tokens = len(self.token_ids)
        for name in ("token_ids", "positions", "slots"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int64 or tensor.shape != (tokens,):
                raise ValueError(
                    f"RingTask.{name} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"not int64 ({tokens},)"
                )
        if len(self.blocks) != self.link.size:
            raise ValueError(
                f"RingTask.blocks are {len(self.blocks)}, the ring's members {self.link.size}"
            )
        if self.wants_rows and not (tokens and self.last_layer):
            raise ValueError(
                f"a RingTask of {tokens} tokens with last_layer {self.last_layer} wants rows"
            )


class OrderedBlocks:
    """One layer's K/V of all members, in the order of the tokens."""

    def __init__(self, blocks: Sequence[KvBlock], memory: Tensor) -> None:
        """memory: as `RingAttention`'s."""
        page_tokens = memory.shape[3]
        self._places = [_places(block, page_tokens) for block in blocks]
        tokens = max(int(positions.max(initial=-1)) + 1 for *_, positions in self._places)
        pages = ceil_div(tokens, page_tokens)
        self.memory = memory.new_empty(pages, *memory.shape[1:])
        self.block = KvBlock(
            torch.arange(pages, dtype=torch.int32), torch.arange(tokens, dtype=torch.int32)
        )

    def take(self, step: int, memory: Tensor) -> None:
        """Copies the layer's block of a step, whose pages lie in `memory`."""
        pages, rows, positions = self._places[step]
        to_pages, to_rows = np.divmod(positions, self.memory.shape[3])
        self.memory[to_pages, :, :, to_rows] = memory[pages, :, :, rows]


Planner = Callable[[Tensor, KvBlock, int | None], AttentionPlan]
"""Plans the attention of rows at positions (int32 [r]) over a block, under a sliding window."""


class RingAttention:
    """The attention of one member's pass, layer after layer."""

    def __init__(
        self,
        task: RingTask,
        memory: Tensor,
        plan: Planner,
        windows: Sequence[int | None],
        *,
        to_the_end: bool = True,
    ) -> None:
        """memory: the pool's storage as [layers * pages, 2, k, page_tokens, d]; ``windows[i]``:
        layer i's sliding window; `to_the_end`: the last of these is the model's last."""
        self._link = task.link
        self._memory = memory
        goes_round = task.last_layer or not to_the_end
        self._exchanged = len(windows) if goes_round else len(windows) - 1
        self._ordered: OrderedBlocks | None = None
        blocks = task.blocks
        if determinism.is_on_in_groups() and len(task.token_ids) and not _is_ordered(blocks):
            self._ordered = OrderedBlocks(blocks, memory)
            blocks = [self._ordered.block]
        #: Reduces the last layer's rows to one or to none.
        self.is_cut = to_the_end and not task.want_hidden

        @cache
        def plans(window: int | None, is_cut: bool) -> list[AttentionPlan | None]:
            rows = task.positions.to(torch.int32)
            if is_cut:
                rows = rows[-1:] if task.want_logits else rows[:0]
            return [
                plan(rows, block, window) if len(rows) and len(block.positions) else None
                for block in blocks
            ]

        last = len(windows) - 1
        self._plans = [plans(w, self.is_cut and i == last) for i, w in enumerate(windows)]
        self._partial: tuple[Tensor, Tensor] | None = None

    def run(
        self, layer: int, q_nhd: Tensor, kv_layer: Tensor, scale: float, out: Tensor | None = None
    ) -> Tensor:
        """Computes attention of q [n, h, d], whose K/V is in its pages, over the blocks of all
        members.

        Takes part in the exchange even where no row is to be computed. Returns out [n, h, d] of q's
        dtype. After an abort out lacks blocks, and the pass must be dropped.
        """
        out = torch.empty_like(q_nhd) if out is None else out
        is_whole = self._link.history(layer)
        if layer >= self._exchanged:
            return out
        if is_whole:
            self._link.publish(layer)
        plans = self._plans[layer]
        if self._ordered is not None:
            self._run_in_order(self._ordered, plans[0], is_whole, q_nhd, kv_layer, scale, out)
            return out
        is_partial = len(plans) > 1 and out.dtype is not torch.float32
        total = torch.empty_like(out, dtype=torch.float32) if is_partial else out
        lse = q_nhd.new_empty(q_nhd.shape[:2], dtype=torch.float32)
        if plans[0] is not None:
            kernels.run_attention(plans[0], q_nhd, kv_layer, scale=scale, out=total, lse_out=lse)
        for step in range(1, len(plans)):
            is_whole = is_whole and self._link.wait(step)
            if not is_whole:
                break
            if (plan := plans[step]) is not None:
                kernels.merge_attention_(total, lse, *self._attend(plan, q_nhd, scale))
            self._link.release(step)
        return out.copy_(total) if is_partial else out

    def _run_in_order(
        self,
        ordered: OrderedBlocks,
        plan: AttentionPlan | None,
        is_whole: bool,
        q_nhd: Tensor,
        kv_layer: Tensor,
        scale: float,
        out: Tensor,
    ) -> None:
        ordered.take(0, kv_layer)
        for step in range(1, self._link.size):
            if not (is_whole := is_whole and self._link.wait(step)):
                return
            ordered.take(step, self._memory)
            self._link.release(step)
        if plan is not None:
            kernels.run_attention(plan, q_nhd, ordered.memory, scale=scale, out=out)

    def _attend(self, plan: AttentionPlan, q_nhd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Returns a partial result over a block that has arrived; the next call overwrites it."""
        if self._partial is None or len(self._partial[0]) != len(q_nhd):
            wide = torch.empty(q_nhd.shape, dtype=torch.float32, device=q_nhd.device)
            self._partial = wide, wide.new_empty(q_nhd.shape[:2])
        out, lse = self._partial
        return kernels.run_attention(plan, q_nhd, self._memory, scale=scale, out=out, lse_out=lse)


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
) -> RingTask:
    """Builds the task of rank ``link.rank`` in ``shares.passes[number]``; the caller sets its
    wants.

    prompt_ids: int64 [prompt tokens]; ``pages``: the page ids that the request has at this member,
    in the order in which it took them; ``buffers``: the pages lent to each of the ring's buffers.
    """
    now, share, page_tokens = shares.passes[number], shares.shares[link.rank], layout.page_tokens
    runs = now.runs[link.rank]
    positions = _concatenated([(run.start_token, run.num_tokens) for run in runs])
    place = _concatenated([(run.slot, run.num_tokens) for run in runs])
    own = torch.tensor([pages[page] for page in share.pages], dtype=torch.int32)
    lent = [
        torch.tensor(buffer_memory(ids, layout.buffer_layers, layout.num_pages), dtype=torch.int32)
        for ids in buffers
    ]
    blocks = [_block(own, shares, now.filled, link.rank, page_tokens)]
    for step in range(1, link.size):
        rank = (link.rank - step) % link.size
        blocks.append(_block(lent[buffer_of(step)], shares, now.filled, rank, page_tokens))
    return RingTask(
        token_ids=prompt_ids[positions],
        positions=positions,
        slots=own.long()[place // page_tokens] * page_tokens + place % page_tokens,
        blocks=blocks,
        link=link,
        last_layer=last_layer,
    )


def _block(
    pages: Tensor, shares: ChunkShares, filled: Sequence[int], rank: int, page_tokens: int
) -> KvBlock:
    """Returns the used part of rank `rank`'s share, where it lies in `pages`."""
    slots = filled[rank]
    used: array[int] = shares.shares[rank].positions[:slots]
    positions = torch.from_numpy(np.array(used, dtype=np.int32))
    return KvBlock(pages[: ceil_div(slots, page_tokens)], positions)


def _is_ordered(blocks: Sequence[KvBlock]) -> bool:
    positions = blocks[0].positions
    return len(blocks) == 1 and torch.equal(positions, torch.arange(len(positions)))


def _places(block: KvBlock, page_tokens: int) -> tuple[IntArray, IntArray, IntArray]:
    """Returns page, row in the page and position of each token of a block, int64 [tokens]."""
    positions = block.positions.numpy().astype(np.int64)
    (slots,) = np.nonzero(positions != PAD)
    return block.pages.numpy()[slots // page_tokens], slots % page_tokens, positions[slots]


def _concatenated(ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Returns int64: the numbers of each (first, count), one range after another."""
    none = torch.empty(0, dtype=torch.int64)
    return torch.cat([none, *(torch.arange(first, first + n) for first, n in ranges)])
