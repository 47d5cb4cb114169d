"""How the scheduler's chunks become forward passes."""

from hypothesis import given
from hypothesis import strategies as st

from millrace.worker.codec import passes


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=5), limit=st.integers(1, 1000))
def test_passes_cover_every_chunk_in_order_within_the_limit(lengths: list[int], limit: int) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    parts = passes(list(zip(starts, lengths, strict=True)), limit)

    position = 0
    for chunk, start, tokens in parts:
        assert start == position
        assert 1 <= tokens <= limit
        assert starts[chunk] <= start < starts[chunk] + lengths[chunk]
        position += tokens
    assert position == sum(lengths)


@given(tokens=st.integers(1, 100_000), limit=st.integers(1, 4096))
def test_parts_of_a_chunk_differ_by_one_token_at_most(tokens: int, limit: int) -> None:
    sizes = [size for _, _, size in passes([(0, tokens)], limit)]

    assert max(sizes) - min(sizes) <= 1
