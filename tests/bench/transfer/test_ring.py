"""`bench/transfer/ring.py` on a small case, between two real processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.bench.transfer import ring


def test_both_ways_move_the_blocks_of_all_members():
    kv = replace(ring.LAYOUT, page_tokens=64)
    heard = []
    (rate,) = ring.measure(
        members=(2,), block_mib=(1,), layers=3, repeats=1, kv=kv, on_progress=heard.append
    )
    assert heard == ["2 members, blocks of 1 MiB"]
    assert (rate.members, rate.block_bytes, rate.layers) == (2, 1 << 20, 3)
    assert rate.ratio == pytest.approx(rate.bytes_per_s / rate.bare_bytes_per_s)
    assert min(rate.bytes_per_s, rate.bare_bytes_per_s) > 1e6
