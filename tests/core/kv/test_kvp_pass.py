"""Which rows of a pass go to which KVP worker, and how they are encoded."""

from __future__ import annotations

import random

import pytest

from millrace.core.errors import ConfigError, TransferError
from millrace.core.kv.kvp_pass import (
    ExchangeShape,
    RemoteRows,
    RemoteShard,
    pack_table,
    pieces_of,
    remote_rows,
    unpack_table,
)

SHARDS = (
    RemoteShard(worker="a", shard=1, start_token=10, end_token=20),
    RemoteShard(worker="b", shard=7, start_token=20, end_token=40),
)


def rows_of(found: list[RemoteRows]) -> list[tuple[str, int, int, int, int]]:
    return [(e.worker, e.first_row, e.num_rows, e.first_position, e.new_rows) for e in found]


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [
        (0, 10, []),
        (5, 8, [("a", 105, 3, 10, 3)]),
        (15, 10, [("a", 100, 10, 15, 5), ("b", 105, 5, 20, 5)]),
        (39, 1, [("a", 100, 1, 39, 0), ("b", 100, 1, 39, 1)]),
        (0, 40, [("a", 110, 30, 10, 10), ("b", 120, 20, 20, 20)]),
    ],
)
def test_rows_at_and_past_a_shard_go_to_its_worker(first, count, expected):
    found = remote_rows(SHARDS, first_row=100, first_position=first, num_rows=count)
    assert rows_of(found) == expected


def test_rows_that_have_left_a_shard_behind_by_every_window_stay_away():
    """With a window of 4, position 22 sees 19, the last of the first shard; 23 does not."""
    found = remote_rows(SHARDS, first_row=0, first_position=15, num_rows=10, reach=4)
    assert rows_of(found) == [("a", 0, 8, 15, 5), ("b", 5, 5, 20, 5)]
    found = remote_rows(SHARDS, first_row=0, first_position=23, num_rows=1, reach=4)
    assert rows_of(found) == [("b", 0, 1, 23, 1)]


def test_pieces_hold_all_rows_once_in_order():
    rng = random.Random(1)
    for _ in range(50):
        first, entries = 0, []
        for _ in range(rng.randrange(1, 6)):
            found = remote_rows(
                SHARDS[: rng.randrange(1, 3)],
                first_row=first,
                first_position=rng.randrange(45),
                num_rows=rng.randrange(1, 30),
            )
            entries += found
            first += 30
        max_rows = rng.randrange(1, 20)
        pieces = pieces_of(entries, max_rows)
        for piece in pieces:
            assert 0 < sum(entry.num_rows for entry in piece) <= max_rows
            rows = [r for e in piece for r in range(e.first_row, e.first_row + e.num_rows)]
            assert rows == sorted(set(rows))

        def flat(some):
            return [
                (e.shard, e.first_row + i, e.first_position + i, i < e.new_rows)
                for e in some
                for i in range(e.num_rows)
            ]

        assert flat(entry for piece in pieces for entry in piece) == flat(entries)


def test_tables_come_as_they_went():
    rows = remote_rows(SHARDS, first_row=0, first_position=15, num_rows=10)
    read = unpack_table(pack_table(rows), 15)
    assert [(e.shard, e.first_position, e.num_rows, e.new_rows) for e in read] == [
        (1, 15, 10, 5),
        (7, 20, 5, 5),
    ]
    with pytest.raises(TransferError, match="has 15 rows; the exchange has room for 14"):
        unpack_table(pack_table(rows), 14)
    with pytest.raises(TransferError, match="no row table"):
        unpack_table(b"123", 14)
    with pytest.raises(TransferError, match="no rows, or more new ones"):
        unpack_table(pack_table([rows[1].cut(5)[1]]), 14)


def test_the_memory_of_a_pair_holds_the_largest_piece():
    shape = ExchangeShape(num_q_heads=6, num_kv_heads=2, head_dim=64, element_bytes=2, max_rows=100)
    assert shape.queries_at >= 100 * shape.entry_bytes
    assert shape.request_bytes >= shape.queries_at + 100 * (6 + 2 * 2) * 64 * 2
    assert shape.reply_bytes >= 100 * 6 * 65 * 4
    assert not shape.request_bytes % 64 and not shape.reply_bytes % 64
    with pytest.raises(ConfigError, match=r"exchange.max_rows is 0"):
        ExchangeShape(num_q_heads=6, num_kv_heads=2, head_dim=64, element_bytes=2, max_rows=0)
