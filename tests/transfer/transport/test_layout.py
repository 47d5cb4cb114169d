"""Runs against an oracle that moves one head of one token at a time; coalescing; refusals."""

from __future__ import annotations

import dataclasses
import time
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.errors import ConfigError
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import Run
from millrace.transfer.transport.layout import (
    Side,
    at_layer,
    layer_runs,
    layer_token_bytes,
    mismatch,
    packed,
    shared_heads,
    shared_layers,
)
from millrace.transfer.transport.regions import Memory, copy_on_host

HEADS = 4
BASE = KvLayout(
    model_hash="m",
    dtype="bfloat16",
    num_layers=2,
    num_kv_heads=HEADS,
    head_dim=3,
    page_tokens=4,
    head_start=0,
    head_count=HEADS,
    num_pages=1,
)


@st.composite
def runs_of(draw, prompt: int, page_tokens: int) -> list[Run]:
    """A prompt cut at random, its pieces in any order, with empty slots between some of them."""
    cuts = draw(st.sets(st.integers(1, prompt), max_size=6)) | {prompt}
    pieces = [(a, b - a) for a, b in pairwise([0, *sorted(cuts)])]
    runs, slot = [], 0
    for start, count in draw(st.permutations(pieces)):
        slot += draw(st.sampled_from([0, 0, -slot % page_tokens, page_tokens]))
        runs.append(Run(start, count, slot))
        slot += count
    return runs


@st.composite
def sides(draw):
    """Two pools with a prompt in random pages of each, whole or in runs; a token range of it."""
    prompt = draw(st.integers(1, 40))
    made = []
    for _ in range(2):
        first = draw(st.integers(0, HEADS - 1))
        page_tokens = draw(st.integers(1, 9))
        runs = draw(st.none() | runs_of(prompt, page_tokens))
        end = max(run.slot + run.num_tokens for run in runs) if runs else prompt
        needed = -(-end // page_tokens)
        pages = needed + draw(st.integers(0, 3))
        heads = draw(st.integers(1, HEADS - first))
        layout = dataclasses.replace(
            BASE,
            page_tokens=page_tokens,
            head_start=first,
            head_count=heads,
            num_pages=pages,
            parts=draw(st.sampled_from([n for n in (1, 2, 3, 4) if heads % n == 0])),
            copies=draw(st.integers(1, 3)),
        )
        order = draw(st.permutations(range(pages)))[:needed]
        made.append(Side.of_runs(layout, order, runs) if runs else Side.of(layout, order, prompt))
    start = draw(st.integers(0, prompt - 1))
    return *made, start, draw(st.integers(1, prompt - start))


def row_of(side: Side, pool: np.ndarray, copy, layer, token, head) -> np.ndarray:
    """Returns the K and V of one head of one token in a pool, from its shape alone."""
    layout = side.layout
    slot = next(
        int(slot) + token - int(start)
        for start, end, slot in zip(side.starts, side.ends, side.slots, strict=True)
        if start <= token < end
    )
    page, row = side.pages[slot // layout.page_tokens], slot % layout.page_tokens
    shape = (
        layout.parts,
        layout.copies,
        layout.num_layers,
        layout.num_pages,
        2,
        layout.part_heads,
        layout.page_tokens,
        layout.head_dim,
    )
    part, head = divmod(head - layout.head_start, layout.part_heads)
    return pool.reshape(shape)[part, copy, layer, page, :, head, row]


def oracle(sender, receiver, source, target, layer, tokens, copies=0) -> None:
    """`copies` of the sender's take turns; 0: all of them."""
    copies = copies or sender.layout.copies
    first, count = shared_heads(sender.layout, receiver.layout)
    for copy, *place in product(range(receiver.layout.copies), tokens, range(first, first + count)):
        sent = row_of(sender, source, copy % copies, layer, *place)
        row_of(receiver, target, copy, layer, *place)[:] = sent


def memory(array) -> Memory:
    return Memory.of_array(array.view(np.uint8))


@settings(max_examples=60)
@given(sides(), st.integers(0, BASE.num_layers - 1))
def test_runs_move_exactly_what_the_oracle_moves(drawn, layer):
    sender, receiver, start, count = drawn
    size = [side.layout.pool_bytes // 2 for side in (sender, receiver)]
    source = np.arange(1, size[0] + 1, dtype=np.uint16)
    target, expected = np.zeros(size[1], dtype=np.uint16), np.zeros(size[1], dtype=np.uint16)
    runs = layer_runs(sender, receiver, start, count)
    if shared_heads(sender.layout, receiver.layout) is None:
        assert len(runs) == 0
        return
    runs = at_layer(runs, sender.layout, receiver.layout, layer)
    copy_on_host(memory(source), memory(target), runs)
    oracle(sender, receiver, source, expected, layer, range(start, start + count))
    assert (target == expected).all()
    sent = count * layer_token_bytes(sender.layout, receiver.layout)
    assert runs.total_bytes == receiver.layout.copies * sent


@settings(max_examples=40)
@given(sides())
def test_through_a_staging_slot_the_bytes_are_the_same(drawn):
    sender, receiver, start, count = drawn
    if shared_heads(sender.layout, receiver.layout) is None:
        with pytest.raises(ValueError, match="no common heads"):
            packed(sender.layout, receiver, start, count)
        return
    source = np.arange(1, sender.layout.pool_bytes // 2 + 1, dtype=np.uint16)
    slot = packed(sender.layout, receiver, start, count)
    staged = np.zeros(slot.layout.pool_bytes // 2, dtype=np.uint16)
    size = receiver.layout.pool_bytes // 2
    target, expected = np.zeros(size, dtype=np.uint16), np.zeros(size, dtype=np.uint16)
    copy_on_host(memory(source), memory(staged), layer_runs(sender, slot, start, count))
    assert staged.all()  # packed tightly
    copy_on_host(memory(staged), memory(target), layer_runs(slot, receiver, start, count))
    oracle(sender, receiver, source, expected, 0, range(start, start + count), copies=1)
    assert (target == expected).all()


@settings(max_examples=40)
@given(sides())
def test_runs_are_coalesced_and_never_overlap(drawn):
    sender, receiver, start, count = drawn
    runs = layer_runs(sender, receiver, start, count)
    again = runs.coalesced()
    assert len(again) == len(runs)
    order = np.argsort(runs.target)
    ends = (runs.target + runs.length)[order]
    assert (ends[:-1] <= runs.target[order][1:]).all()


def test_neighbouring_whole_pages_become_one_run():
    layout = dataclasses.replace(BASE, num_pages=8)
    sender = Side.of(layout, [2, 3, 4, 5], 16)
    runs = layer_runs(sender, Side.of(layout, [0, 1, 2, 7], 16), 0, 16)
    assert runs.length.tolist() == [3 * layout.page_bytes, layout.page_bytes]
    assert runs.source.tolist() == [2 * layout.page_bytes, 5 * layout.page_bytes]


def test_a_million_tokens_take_no_seconds():
    layout = dataclasses.replace(
        BASE, num_kv_heads=8, head_count=8, head_dim=128, page_tokens=16, num_pages=1 << 16
    )
    other = dataclasses.replace(layout, page_tokens=24, head_start=2, head_count=4)
    sender = Side.of(layout, np.random.default_rng(0).permutation(1 << 16), 1 << 20)
    receiver = Side.of(other, range(other.pages_for(1 << 20)), 1 << 20)
    before = time.process_time()
    runs = layer_runs(sender, receiver, 0, 1 << 20)
    assert time.process_time() - before < 1.5
    assert runs.total_bytes == (1 << 20) * layer_token_bytes(layout, other)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"model_hash": "n"}, "model_hash differs: the sender has 'n', the receiver 'm'"),
        ({"dtype": "float32"}, "dtype differs: the sender has 'float32'"),
        ({"model_layers": 9}, "model_layers differs: the sender has 9, the receiver 2"),
        ({"page_tokens": 9, "num_pages": 50}, ""),
    ],
)
def test_mismatch_names_both_values(change, pattern):
    found = mismatch(dataclasses.replace(BASE, **change), BASE)
    assert pattern in found and bool(found) == bool(pattern)


def test_layers_may_differ_if_they_overlap():
    first, last = (dataclasses.replace(BASE, num_layers=1, layer_start=start) for start in (0, 1))
    assert mismatch(first, BASE) == mismatch(BASE, last) == ""
    assert mismatch(first, last) == "no common layers: the sender has 0..0, the receiver 1..1"
    assert list(shared_layers(range(1, 5), range(3, 9))) == [3, 4]
    assert not shared_layers(range(5, 9), range(1, 3))


def test_disjoint_heads_do_not_match():
    low, high = (dataclasses.replace(BASE, head_start=start, head_count=2) for start in (0, 2))
    assert mismatch(low, high) == ("no common heads: the sender has 0..1, the receiver 2..3")


@pytest.mark.parametrize(
    ("pages", "tokens", "pattern"),
    [([0], 5, "can't hold"), ([0, 9], 5, "outside the pool"), ([-1], 1, "outside the pool")],
)
def test_pages_that_cannot_be(pages, tokens, pattern):
    with pytest.raises(ValueError, match=pattern):
        Side.of(dataclasses.replace(BASE, num_pages=9), pages, tokens)


@pytest.mark.parametrize(
    ("runs", "pattern"),
    [
        ([Run(0, 4, 0), Run(3, 2, 4)], "a token in common"),
        ([Run(0, 4, 0), Run(9, 2, 3)], "a slot in common"),
        ([Run(0, 4, 0), Run(4, 5, 4)], "leaves the 2 pages of 4 tokens"),
        ([Run(0, 0, 0)], "a run is empty"),
        ([Run(0, 1, -1)], "begins before 0"),
    ],
)
def test_runs_that_cannot_be(runs, pattern):
    with pytest.raises(ValueError, match=pattern):
        Side.of_runs(dataclasses.replace(BASE, num_pages=9), [0, 1], runs)


def test_tokens_that_do_not_lie_here_are_refused():
    layout = dataclasses.replace(BASE, num_pages=9)
    share = Side.of_runs(layout, [4, 2], [Run(8, 2, 0), Run(3, 4, 4)])
    target = Side.of(layout, range(3), 12)
    assert layer_runs(share, target, 3, 4).total_bytes == 4 * layer_token_bytes(layout, layout)
    for start, count in ((2, 1), (6, 2), (8, 3), (3, 7), (11, 1)):
        with pytest.raises(ValueError, match="does not lie in these pages"):
            layer_runs(share, target, start, count)
    with pytest.raises(ValueError, match="token 0 does not lie"):
        layer_runs(Side.of_runs(layout, [], []), target, 0, 1)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": "int8"}, "kv_layout.dtype is 'int8'"),
        ({"num_pages": 0}, "kv_layout.num_pages is 0"),
        ({"parts": 0}, "kv_layout.parts is 0"),
        ({"parts": 3}, "kv_layout.parts is 3; it must divide the 4 heads"),
        ({"copies": 0}, "kv_layout.copies is 0"),
        ({"layer_start": 1}, r"kv_layout.layer_start\.\.layer_end is 1\.\.3; it must lie within"),
        ({"layer_start": -1}, r"kv_layout.layer_start\.\.layer_end is -1\.\.1"),
        ({"num_layers": 3}, r"is 0\.\.3; it must lie within the model's 2 layers"),
        ({"head_start": 3, "head_count": 2}, r"kv_layout.head_start\.\.head_end is 3\.\.5"),
    ],
)
def test_a_layout_that_cannot_be_names_its_field(change, field):
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(BASE, **change)


def test_sizes():
    assert BASE.row_bytes == 6
    assert BASE.page_bytes == 2 * 4 * 4 * 6
    assert BASE.bytes_per_token * BASE.page_tokens == BASE.page_bytes * BASE.num_layers
    assert BASE.pool_bytes == BASE.page_bytes * 2
    assert BASE.model_layers == 2 and BASE.layer_offset(1) == BASE.layer_bytes
    stage = dataclasses.replace(BASE, layer_start=7, model_layers=9)
    assert list(stage.layers) == [7, 8] and stage.layer_offset(8) == BASE.layer_bytes
    assert [BASE.pages_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_ranks_have_equal_pools_and_name_their_heads():
    ranks = dataclasses.replace(BASE, parts=2, copies=3)
    assert ranks.ranks == 6 and ranks.part_bytes == BASE.part_bytes // 2
    assert ranks.pool_bytes == 6 * ranks.part_bytes
    assert ranks.bytes_per_token == BASE.bytes_per_token
    assert [ranks.heads_of(rank) for rank in range(6)] == [range(0, 2)] * 3 + [range(2, 4)] * 3
