"""Journal frames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.state.keys import journal_frame, journal_tokens

FRAMES = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2**31 - 1), max_size=5)), max_size=20
)


@given(FRAMES)
def test_every_choice_reads_back_in_order(frames: list[tuple[int, list[int]]]) -> None:
    journal = b"".join(journal_frame(choice, ids) for choice, ids in frames)
    for choice in range(4):
        wanted = [token for c, ids in frames if c == choice for token in ids]
        assert journal_tokens(journal, choice).tolist() == wanted
