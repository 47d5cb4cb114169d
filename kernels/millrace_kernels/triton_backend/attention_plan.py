"""Assigns rows and K/V slots to programs, on the host once per step.

A tile is as many rows of one sequence as fit a block with all query heads of a K/V head. Its range
of slots is cut into pieces where the sequence alone has too few tiles to fill the device (decode,
or a short chunk over a long history); the pieces' results are merged afterwards. Tiles and pieces
of a sequence depend on that sequence alone, so its result has the same bits in any batch.

It uses numpy only: a decode batch has hundreds of sequences, and this runs before every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from millrace_kernels.plan import AttentionPlan
from millrace_kernels.triton_backend.configs import Config
from millrace_kernels.triton_backend.jit import block

Ints = npt.NDArray[np.int64]

_SEQUENCE_PROGRAMS: Final = 528
"""The most programs of one sequence: four for each SM of an H100. Bounds the partial results."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows that share programs, and the K/V slots [begin, end) that any of them sees.

    All of the rows see the slots from `full_begin` to `full_end`; these two, and `begin`, are
    multiples of the block of slots. All int64 [tiles].
    """

    sequence: Ints
    first_row: Ints
    rows: Ints
    begin: Ints
    end: Ints
    full_begin: Ints
    full_end: Ints


@dataclass(frozen=True, slots=True)
class Work:
    """One launch: `items` int32 [items, 9] and `merges` int32 [merges, 4] as the kernels read them,
    and the number of rows of partial results.
    """

    items: npt.NDArray[np.int32]
    merges: npt.NDArray[np.int32]
    partial_rows: int


def block_m(plan: AttentionPlan, config: Config) -> int:
    """Returns rows of a tile times query heads of a K/V head, at least one row's."""
    return max(config["block_m"], block(plan.num_q_heads // plan.num_kv_heads))


def tile_rows(plan: AttentionPlan, config: Config) -> int:
    """Returns the rows of q in a tile."""
    return block_m(plan, config) // (plan.num_q_heads // plan.num_kv_heads)


def row_positions(plan: AttentionPlan) -> Ints:
    """Returns the position of each row of q, int64 [n]."""
    if plan.q_positions is not None:
        return plan.q_positions.numpy().astype(np.int64)
    starts, kv_lens = plan.q_indptr.numpy().astype(np.int64), plan.kv_lens.numpy()
    lengths = np.diff(starts)
    return np.arange(plan.num_tokens) + np.repeat(kv_lens - lengths - starts[:-1], lengths)


def build_work(plan: AttentionPlan, config: Config, chosen: npt.NDArray[np.bool_]) -> Work:
    """Builds the work of the `chosen` sequences (bool [B]), the longest first."""
    tiles = build_tiles(plan, config, np.flatnonzero(chosen))
    pieces, piece_slots = _pieces(plan, tiles, config)
    own = np.repeat(np.arange(len(pieces)), pieces)
    index = _count_up(pieces)
    begin = tiles.begin[own] + index * piece_slots[own]
    end = np.minimum(begin + piece_slots[own], tiles.end[own])
    split = pieces > 1
    partial_rows = np.where(split, pieces * tiles.rows, 0)
    first_partial = np.cumsum(partial_rows) - partial_rows
    partial = np.where(split[own], first_partial[own] + index * tiles.rows[own], -1)
    kv_lens = plan.kv_lens.numpy().astype(np.int64)
    kv_base = np.cumsum(kv_lens) - kv_lens
    if plan.kv_positions is None:
        kv_base[:] = 0
    fields = (
        tiles.sequence[own],
        tiles.first_row[own],
        tiles.rows[own],
        begin,
        end,
        np.clip(tiles.full_begin[own], begin, end),
        np.clip(tiles.full_end[own], begin, end),
        kv_base[tiles.sequence[own]],
        partial,
    )
    longest_first = np.argsort(begin - end, kind="stable")
    items = np.stack(fields, 1)[longest_first].astype(np.int32)

    merged = np.repeat(np.flatnonzero(split), tiles.rows[split])
    row = _count_up(tiles.rows[split])
    merges = np.stack(
        (
            tiles.first_row[merged] + row,
            first_partial[merged] + row,
            tiles.rows[merged],
            pieces[merged],
        ),
        1,
    )
    return Work(items, merges.astype(np.int32), int(partial_rows.sum()))


def build_tiles(plan: AttentionPlan, config: Config, sequences: Ints) -> Tiles:
    """Builds the tiles of these sequences, in order."""
    starts = plan.q_indptr.numpy().astype(np.int64)
    lengths = np.diff(starts)[sequences]
    per_tile, block_n = tile_rows(plan, config), config["block_n"]
    counts = -(-lengths // per_tile)
    sequence = np.repeat(sequences, counts)
    offset = _count_up(counts) * per_tile
    first_row = starts[sequence] + offset
    rows = np.minimum(np.repeat(lengths, counts) - offset, per_tile)
    low, high = _extremes(row_positions(plan), first_row, rows)
    begin, end, full_begin, full_end = _seen(plan, sequence, low, high)

    begin = np.minimum(begin, end) // block_n * block_n
    full_begin = np.maximum(-(-full_begin // block_n) * block_n, begin)
    full_end = full_end // block_n * block_n
    no_full = full_end <= full_begin
    return Tiles(
        sequence,
        first_row,
        rows,
        begin,
        end,
        np.where(no_full, begin, full_begin),
        np.where(no_full, begin, full_end),
    )


def _extremes(positions: Ints, first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Returns the lowest and highest of positions[first : first + count], for each range."""
    if not len(first):
        return first, first
    bounds = np.stack((first, first + count), 1).ravel()
    padded = np.append(positions, 0)  # a last range ends at len(positions)
    return np.minimum.reduceat(padded, bounds)[::2], np.maximum.reduceat(padded, bounds)[::2]


def _seen(
    plan: AttentionPlan, sequence: Ints, low: Ints, high: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns first slot and last + 1 that any row sees, then the same of a range that every row
    sees, for tiles whose rows stand from `low` to `high`.
    """
    kv_len = plan.kv_lens.numpy().astype(np.int64)[sequence]
    window = plan.sliding_window
    full = np.zeros_like(kv_len), kv_len.copy()
    some = np.zeros_like(kv_len), kv_len.copy()
    kv_positions = None if plan.kv_positions is None else plan.kv_positions.numpy()
    kv_start = 0
    for index, (_, _, length) in enumerate(plan.sequences if kv_positions is not None else ()):
        own = np.flatnonzero(sequence == index)
        assert kv_positions is not None  # else the tile would have no slots
        at = kv_positions[kv_start : kv_start + length].astype(np.int64)
        kv_start += length
        # The highest position up to each slot and the lowest from it on: both never decrease.
        until = np.maximum.accumulate(at)
        onward = np.minimum.accumulate(at[::-1])[::-1]
        if plan.causal:
            some[1][own] = np.searchsorted(onward, high[own], "right")
            full[1][own] = np.searchsorted(until, low[own], "right")
        if window is not None:
            some[0][own] = np.searchsorted(until, low[own] - window, "right")
            full[0][own] = np.searchsorted(onward, high[own] - window, "right")
    if kv_positions is None and plan.causal:
        some[1][:], full[1][:] = np.clip(high + 1, 0, kv_len), np.clip(low + 1, 0, kv_len)
    if kv_positions is None and window is not None:
        some[0][:] = np.clip(low - window + 1, 0, kv_len)
        full[0][:] = np.clip(high - window + 1, 0, kv_len)
    return *some, *full


def _pieces(plan: AttentionPlan, tiles: Tiles, config: Config) -> tuple[Ints, Ints]:
    """Returns into how many pieces each tile's slots are cut, and how many slots a piece has."""
    block_n = config["block_n"]
    _, inverse, tiles_of = np.unique(tiles.sequence, return_inverse=True, return_counts=True)
    most = np.maximum(_SEQUENCE_PROGRAMS // (tiles_of[inverse] * plan.num_kv_heads), 1)
    slots = tiles.end - tiles.begin
    wanted = np.clip(-(-slots // config["split_slots"]), 1, most)
    blocks = np.maximum(-(-slots // block_n), 1)
    piece_blocks = -(-blocks // wanted)
    return -(-blocks // piece_blocks), piece_blocks * block_n


def _count_up(counts: Ints) -> Ints:
    """Returns 0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, and so on."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - counts, counts)
