"""A KVP worker's attention over the pages of its shards, for the shards' KV owners.

A piece of a pass has rows of several shards. Its table comes with its first layer, and is planned
once; then each layer's q and new K/V lie in the exchange's memory, which also takes the partial
results. Positions count from the shard's first token: a row after the shard sees all its tokens.

Shape letters: r rows and m new rows of a piece, h q heads, k kv heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import TransferError
from millrace.core.kv.kvp_pass import ExchangeShape, TableEntry, unpack_table
from millrace.engine.attention.kvp_memory import NewRows, PieceViews
from millrace.engine.kv.step_tables import indptr_of, page_table_of
from millrace_kernels import api as kernels
from millrace_kernels.plan import AttentionPlan


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Neighbouring heads of a model: q heads, and the KV heads that they read."""

    q: slice
    kv: slice

    @property
    def num_q_heads(self) -> int:
        return int(self.q.stop - self.q.start)

    @property
    def num_kv_heads(self) -> int:
        return int(self.kv.stop - self.kv.start)


@dataclass(slots=True, eq=False)
class _Shard:
    pages: npt.NDArray[np.int32]
    start_token: int
    end_token: int
    kv_tokens: int = 0  # held here, from start_token on


@dataclass(slots=True, eq=False)
class _Piece:
    entries: list[TableEntry]
    missing: tuple[int, ...]  # entries whose shard is gone
    views: PieceViews
    new: NewRows | None  # rows whose K/V is kept
    kept: Tensor | None  # int64: their indices among the new rows; None: all
    tables: tuple[Tensor, Tensor, Tensor, Tensor]  # indptr, kv_lens, pages, positions
    plans: dict[int | None, AttentionPlan] = field(default_factory=dict)  # by sliding window


class ShardAttention:
    """Attends over one pool. `open` and `landed` come from any thread, the rest from one thread."""

    def __init__(
        self,
        storage: Tensor,
        shape: ExchangeShape,
        memory: Tensor,
        windows: Sequence[int | None],
        backend: str = "auto",
        share: HeadShare | None = None,
        first_layer: int = 0,
    ) -> None:
        """storage: [layers, pages, 2, k, page_tokens, d], or [pools, ...] of these, with the heads
        in their order. memory: uint8, the server's; ``windows[i]``: layer i's sliding window.
        `share`: the heads of the shape for which this object attends; None: all.
        `first_layer`: of the storage, which may have fewer layers than the model.

        Raises ValueError when the pools don't hold the heads of the share.
        """
        self._pools = storage if storage.dim() == 7 else storage[None]
        pools, _, _, _, heads, self._page_tokens, head_dim = self._pools.shape
        if share is None:
            share = HeadShare(slice(0, shape.num_q_heads), slice(0, shape.num_kv_heads))
        if (pools * heads, head_dim) != (share.num_kv_heads, shape.head_dim):
            raise ValueError(
                f"the pools have {pools * heads} heads of {head_dim}, the exchange "
                f"{share.num_kv_heads} of {shape.head_dim}"
            )
        self._shape = shape
        self._share = share
        self._memory = memory
        self._windows = tuple(windows)
        self._backend = backend
        self._first_layer = first_layer
        self._dtype = storage.dtype
        self._shards: dict[int, _Shard] = {}
        self._pieces: dict[int, dict[int, _Piece]] = {}  # by slot, then number

    def open(self, shard: int, pages: Sequence[int], start_token: int, end_token: int) -> None:
        """Opens a shard of tokens [start_token, end_token). Raises ValueError for too few pages."""
        needed = ceil_div(end_token - start_token, self._page_tokens)
        if end_token <= start_token or len(pages) < needed:
            raise ValueError(
                f"shard of tokens {start_token} to {end_token}: it needs {needed} pages and has "
                f"{len(pages)}"
            )
        self._shards[shard] = _Shard(np.array(pages, dtype=np.int32), start_token, end_token)

    def landed(self, shard: int, end_token: int) -> None:
        """Notes that the K/V up to `end_token` lies in the shard's pages."""
        kept = self._shards[shard]
        kept.kv_tokens = max(0, min(end_token, kept.end_token) - kept.start_token)

    def close(self, shard: int) -> None:
        """Closes a shard: nothing reads or writes its pages after this.

        Harmless without a shard.
        """
        self._shards.pop(shard, None)
        for pieces in self._pieces.values():
            for number, piece in pieces.items():
                if any(entry.shard == shard for entry in piece.entries):
                    pieces[number] = self._plan(piece.entries, piece.views)

    def begin(self, slot: int, piece: int, at: tuple[int, int], entries: int) -> None:
        """Begins a piece of an owner's pass, whose table lies in the memory; ``at``: of request and
        reply.

        Raises TransferError for an invalid table.
        """
        table = self._memory[at[0] : at[0] + entries * self._shape.entry_bytes].numpy().tobytes()
        read = unpack_table(table, self._shape.max_rows)
        views = PieceViews.of(
            self._memory,
            self._shape,
            self._dtype,
            at,
            sum(entry.num_rows for entry in read),
            sum(entry.new_rows for entry in read),
        )
        self._pieces.setdefault(slot, {})[piece] = self._plan(read, views)

    @torch.inference_mode()
    def layer(self, slot: int, piece: int, layer: int) -> Sequence[int]:
        """Keeps a layer's new K/V, and attends: out and lse lie in the memory.

        Returns the entries whose shard is gone; their out and lse say that no token was seen.
        Raises TransferError for a piece or layer that does not exist.
        """
        now = self._begun(slot, piece, layer)
        views, device = now.views, self._pools.device
        count, held = len(self._pools), layer - self._first_layer
        if now.new is not None:
            kv = views.kv[:, :, self._share.kv]
            kv = kv if now.kept is None else kv[now.kept]
            now.new.write(self._pools[:, held], kv)
        plan = self._plan_of(now, self._windows[layer])
        scale = self._shape.head_dim**-0.5
        if count == 1 and device.type == "cpu" and self._is_whole:
            kv_layer = self._pools[0, held]
            kernels.run_attention(
                plan, views.q, kv_layer, scale=scale, out=views.out, lse_out=views.lse
            )
            return now.missing
        heads, first = self._share.num_q_heads // count, self._share.q.start
        queries = views.q[:, self._share.q].to(device)
        for number, q in enumerate(queries.chunk(count, dim=1)):
            q_nhd, kv_layer = q.contiguous(), self._pools[number, held]
            wide = torch.empty(q_nhd.shape, dtype=torch.float32, device=device)
            out, lse = kernels.run_attention(plan, q_nhd, kv_layer, scale=scale, out=wide)
            own = slice(first + number * heads, first + (number + 1) * heads)
            views.out[:, own].copy_(out)
            views.lse[:, own].copy_(lse)
        return now.missing

    def views(self, slot: int, piece: int) -> PieceViews:
        """Returns where a piece's rows and partial results lie in the memory. Raises TransferError
        for a piece that does not exist.
        """
        return self._begun(slot, piece, 0).views

    def check(self, slot: int, piece: int, layer: int) -> None:
        """Raises TransferError for a piece or layer that does not exist."""
        self._begun(slot, piece, layer)

    def _begun(self, slot: int, piece: int, layer: int) -> _Piece:
        found = self._pieces.get(slot, {}).get(piece)
        if found is None or not 0 <= layer < len(self._windows):
            raise TransferError(f"piece {piece} was never begun, or has no layer {layer}")
        return found

    @property
    def _is_whole(self) -> bool:
        return self._share.num_q_heads == self._shape.num_q_heads

    def forget(self, slot: int) -> None:
        """Forgets an owner's pass, which is over."""
        self._pieces.pop(slot, None)

    def _plan(self, entries: list[TableEntry], views: PieceViews) -> _Piece:
        """Plans the work of each layer, and notes the tokens that the shards hold from now on."""
        shards = [self._shards.get(entry.shard) for entry in entries]
        kept, pages, offsets, before = [], [], [], 0
        for entry, shard in zip(entries, shards, strict=True):
            if shard is not None and entry.new_rows:
                first = self._grow(entry, shard)
                kept.append(np.arange(before, before + entry.new_rows))
                slots = np.arange(first, first + entry.new_rows)
                pages.append(shard.pages[slots // self._page_tokens])
                offsets.append(slots % self._page_tokens)
            before += entry.new_rows
        rows = np.concatenate(kept) if kept else np.empty(0)
        return _Piece(
            entries=entries,
            missing=tuple(i for i, shard in enumerate(shards) if shard is None),
            views=views,
            new=NewRows(_indices(pages), _indices(offsets)) if kept else None,
            kept=None if len(rows) == before else torch.from_numpy(rows),
            tables=_tables(entries, shards),
        )

    def _grow(self, entry: TableEntry, shard: _Shard) -> int:
        """Returns where an entry's new rows begin in its shard."""
        first = entry.first_position - shard.start_token
        end = first + entry.new_rows
        if not 0 <= first <= shard.kv_tokens or end > shard.end_token - shard.start_token:
            raise TransferError(
                f"shard {entry.shard}, of tokens {shard.start_token} to {shard.end_token}, holds "
                f"{shard.kv_tokens}; {entry.new_rows} come at {entry.first_position}"
            )
        shard.kv_tokens = max(shard.kv_tokens, end)
        return first

    def _plan_of(self, piece: _Piece, window: int | None) -> AttentionPlan:
        plan = piece.plans.get(window)
        if plan is None:
            indptr, kv_lens, pages, positions = piece.tables
            plan = piece.plans[window] = kernels.plan_attention(
                q_indptr=indptr,
                kv_lens=kv_lens,
                page_table=pages,
                page_tokens=self._page_tokens,
                num_q_heads=self._share.num_q_heads // len(self._pools),
                num_kv_heads=self._share.num_kv_heads // len(self._pools),
                head_dim=self._shape.head_dim,
                dtype=self._dtype,
                device=self._pools.device,
                q_positions=positions,
                sliding_window=window,
                backend=self._backend,
            )
        return plan


def _tables(
    entries: Sequence[TableEntry], shards: Sequence[_Shard | None]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q_indptr, kv_lens, page_table and q_positions of a piece."""
    positions = [
        np.arange(entry.first_position, entry.first_position + entry.num_rows, dtype=np.int32)
        - (0 if shard is None else shard.start_token)
        for entry, shard in zip(entries, shards, strict=True)
    ]
    return (
        indptr_of([entry.num_rows for entry in entries]),
        torch.tensor([0 if s is None else s.kv_tokens for s in shards], dtype=torch.int32),
        page_table_of([[0] if s is None else s.pages for s in shards]),
        torch.from_numpy(np.concatenate(positions, dtype=np.int32)),
    )


def _indices(parts: Sequence[npt.NDArray[np.integer]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
