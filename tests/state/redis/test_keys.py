"""Journal frames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.state.redis.keys import journal_frame, journal_tokens

FRAMES = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2**31 - 1), max_size=5)), max_size=20
)


@given(FRAMES, st.integers(0, 3))
def test_every_choice_reads_back_in_order(frames: list[tuple[int, list[int]]], known: int) -> None:
    counts = [0] * 4
    journal = b""
    for choice, ids in frames:
        journal += journal_frame(choice, counts[choice], ids)
        counts[choice] += len(ids)
    for choice in range(4):
        wanted = [token for c, ids in frames if c == choice for token in ids]
        assert journal_tokens(journal, choice).tolist() == wanted
        assert journal_tokens(journal, choice, known).tolist() == wanted[known:]
