"""Journal frames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.state.redis.keys import journal_frame, journal_part

FRAMES = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2**31 - 1), max_size=5)), max_size=20
)


def tokens_of(journal: bytes, choice: int, known: int = 0) -> list[int]:
    return journal_part(journal, choice, known=known, place=0).token_ids.tolist()


@given(FRAMES, st.integers(0, 3))
def test_every_choice_reads_back_in_order(frames: list[tuple[int, list[int]]], known: int) -> None:
    counts = [0] * 4
    journal = b""
    for choice, ids in frames:
        journal += journal_frame(choice, counts[choice], ids)
        counts[choice] += len(ids)
    for choice in range(4):
        wanted = [token for c, ids in frames if c == choice for token in ids]
        assert tokens_of(journal, choice) == wanted
        assert tokens_of(journal, choice, known) == wanted[known:]


LONG = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), max_size=20)


@given(LONG, st.data())
def test_a_journal_that_was_written_again_is_read_again(
    frames: list[list[int]], data: st.DataObject
) -> None:
    """It is written in other frames, so that a place of the old one may be amid a frame."""
    ids = [token for frame in frames for token in frame]
    known, place, old = 0, 0, b""
    for frame in frames:
        old += journal_frame(0, known, frame)
        part = journal_part(old[place:], 0, known=known, place=place)
        assert part.token_ids.tolist() == frame
        known, place = known + len(frame), part.place
    more = data.draw(st.lists(st.integers(0, 2**31 - 1), max_size=9))
    cut = data.draw(st.integers(0, known))
    new = journal_frame(0, 0, ids[:cut]) + journal_frame(0, cut, [*ids[cut:], *more])
    got: list[int] = []
    for _ in range(2):
        part = journal_part(new[place:], 0, known=known + len(got), place=place)
        got, place = [*got, *part.token_ids.tolist()], part.place
    assert got == more
