"""Which member computes and keeps which tokens of a prompt (Tetris section 4.1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.kv.sp_layout import (
    PAD,
    buffer_memory,
    layout,
    pages_taken,
    pass_tokens,
    zigzag,
)
from millrace.core.request import Chunk

IDS = tuple(f"p{i}" for i in range(8))


@st.composite
def plans(draw: st.DrawFn) -> list[Chunk]:
    """Draws chunks of any lengths on groups that grow, perhaps after tokens that decode kept."""
    start = draw(st.integers(0, 300))
    size, chunks = 1, []
    for index in range(draw(st.integers(1, 5))):
        size = draw(st.integers(size, len(IDS)))
        tokens = draw(st.integers(1, 400))
        chunks.append(
            Chunk(index=index, start_token=start, num_tokens=tokens, instance_ids=IDS[:size])
        )
        start += tokens
    return chunks


@given(st.integers(1, 500), st.integers(1, 9))
def test_zigzag_gives_every_token_once_and_the_last_to_the_leader(
    tokens: int, members: int
) -> None:
    shards = zigzag(tokens, members)
    covered = [t for pair in shards for first, count in pair for t in range(first, first + count)]
    assert sorted(covered) == list(range(tokens))
    sizes = [front[1] + back[1] for front, back in shards]
    assert max(sizes) - min(sizes) <= 1
    assert sum(shards[0][1]) == tokens


def test_zigzag_pairs_the_front_with_the_back() -> None:
    """Shards S_i and S_{2N-1-i} of 2N go to instance i: all have the same attention to do."""
    assert zigzag(16, 4) == [
        ((0, 2), (14, 2)),
        ((2, 2), (12, 2)),
        ((4, 2), (10, 2)),
        ((6, 2), (8, 2)),
    ]


@given(st.integers(1, 100_000), st.integers(1, 16), st.integers(1, 4096))
def test_passes_are_even_and_within_the_limit(tokens: int, members: int, limit: int) -> None:
    sizes = pass_tokens(tokens, members, limit)
    assert sum(sizes) == tokens
    assert len(sizes) <= -(-tokens // (members * limit))
    assert all(0 < size <= members * limit for size in sizes)
    assert all(size % members == 0 for size in sizes[:-1])
    assert len(set(sizes[:-1])) <= 1


@given(plans(), st.sampled_from([1, 3, 16]), st.sampled_from([7, 64, 2048]))
def test_every_member_knows_where_everything_lies(
    chunks: list[Chunk], page_tokens: int, limit: int
) -> None:
    laid = layout(chunks, page_tokens, limit)
    for shares in laid.chunks:
        end = shares.chunk.start_token + shares.chunk.num_tokens
        held = sorted(p for share in shares.shares for p in share.positions if p != PAD)
        assert held == list(range(end)), "each token is with one member"
        for share in shares.shares:
            assert len(share.positions) == len(share.pages) * page_tokens
        for one in shares.passes:
            assert all(
                list(shares.shares[rank].positions[run.slot : run.slot + run.num_tokens])
                == list(range(run.start_token, run.start_token + run.num_tokens))
                for rank, runs in enumerate(one.runs)
                for run in runs
            )
            assert sum(run.num_tokens for runs in one.runs for run in runs) == one.num_tokens
    assert laid.total_passes() == sum(len(shares.passes) for shares in laid.chunks)


@given(plans(), st.sampled_from([1, 3, 16]))
def test_history_is_even_to_a_page_and_moves_only_to_new_members(
    chunks: list[Chunk], page_tokens: int
) -> None:
    laid = layout(chunks, page_tokens, 64)
    kept: dict[str, int] = {}
    for shares in laid.chunks:
        for move in shares.moves:
            assert move.giver in kept
            assert move.receiver not in kept
            assert len(move.source) == len(move.target) > 0
        before = {i: kept.get(i, 0) for i in shares.group}
        for move in shares.moves:
            before[move.giver] -= len(move.source)
            before[move.receiver] += len(move.target)
        if shares.moves:
            even = -(-sum(before.values()) // len(shares.group))
            assert all(before[move.giver] <= even for move in shares.moves)
            lacking = sum(max(0, even - before[i]) for i in kept)  # old ones with less keep it
            assert max(before.values()) <= even + lacking
        kept = {i: len(share.pages) for i, share in zip(shares.group, shares.shares, strict=True)}


@given(plans(), st.sampled_from([1, 3, 16]), st.sampled_from([0, 1, 2, 32]))
def test_the_scheduler_counts_the_pages_that_members_take(
    chunks: list[Chunk], page_tokens: int, kv_layers: int
) -> None:
    laid = layout(chunks, page_tokens, 64)
    buffers = 2 * laid.buffer_pages(kv_layers) if kv_layers else 0
    expected = {instance_id: pages + buffers for instance_id, pages in laid.pages.items()}
    assert pages_taken(chunks, page_tokens, kv_layers) == expected


@given(plans(), st.sampled_from([1, 3, 16]))
def test_what_a_member_computed_stays_in_its_slots(chunks: list[Chunk], page_tokens: int) -> None:
    """Decode gets it from there, whatever the member has given away since."""
    laid = layout(chunks, page_tokens, 64)
    computed = [
        token
        for instance_id in laid.members
        for run in laid.computed(instance_id)
        for token in range(run.start_token, run.start_token + run.num_tokens)
    ]
    first, last = chunks[0], chunks[-1]
    assert sorted(computed) == list(range(first.start_token, last.start_token + last.num_tokens))
    for instance_id in laid.members:
        slots = [
            slot
            for run in (*laid.computed(instance_id), *laid.fetched.get(instance_id, ()))
            for slot in range(run.slot, run.slot + run.num_tokens)
        ]
        assert len(set(slots)) == len(slots)
        assert all(slot < laid.pages[instance_id] * page_tokens for slot in slots)


def test_impossible_chunks_are_refused() -> None:
    one = Chunk(index=0, start_token=0, num_tokens=10, instance_ids=("a",))
    gap = Chunk(index=1, start_token=11, num_tokens=10, instance_ids=("a", "b"))
    other = Chunk(index=1, start_token=10, num_tokens=10, instance_ids=("b", "a"))
    with pytest.raises(ValueError, match="chunk 1 begins at token 11, chunk 0 ends at 10"):
        layout([one, gap], 16, 64)
    with pytest.raises(ValueError, match="does not begin with"):
        layout([one, other], 16, 64)


def test_a_buffer_lends_all_layers_of_its_pages() -> None:
    assert buffer_memory([3, 5], kv_layers=2, num_pages=10) == [3, 13, 5, 15]
