"""How often a transport's thread polls."""

from __future__ import annotations

import pytest

from millrace.transfer.transport.poll_pace import (
    IDLE_POLL_S,
    LINGER_S,
    POLL_FIRST_S,
    POLL_MOST_S,
    SPIN_S,
    PollPace,
)


def test_it_slows_down_while_it_listens_and_starts_anew_with_work() -> None:
    pace = PollPace(0.0)
    look = {"is_writing": False, "is_listening": True}
    pauses = [pace.next_s(0.1 * i, worked=False, **look) for i in range(9)]
    assert pauses[0] == POLL_FIRST_S and pauses == sorted(pauses) and pauses[-1] == POLL_MOST_S
    assert pace.next_s(2.0, worked=True, **look) == POLL_FIRST_S


@pytest.mark.parametrize(
    ("is_writing", "is_listening", "quiet_s", "pause_s"),
    [
        (True, False, 0.0, 0.0),
        (True, False, 2 * SPIN_S, POLL_FIRST_S),
        (False, False, LINGER_S / 2, POLL_FIRST_S),
        (False, False, 2 * LINGER_S, IDLE_POLL_S),
        (False, True, 2 * LINGER_S, POLL_FIRST_S),
    ],
)
def test_what_it_waits_for_sets_the_pace(is_writing, is_listening, quiet_s, pause_s) -> None:
    pace = PollPace(5.0)
    found = pace.next_s(
        5.0 + quiet_s, worked=False, is_writing=is_writing, is_listening=is_listening
    )
    assert found == pause_s
