"""The table of states."""

from __future__ import annotations

import pytest

from millrace.core.request import TRANSITIONS, IllegalTransition, RequestState
from support.live_requests import live_request


@pytest.mark.parametrize("start", RequestState)
@pytest.mark.parametrize("end", RequestState)
def test_advance_follows_the_table(start, end):
    subject = live_request(state=start)
    if end in TRANSITIONS[start]:
        subject.advance(end, 1.0)
        assert subject.state is end
    else:
        with pytest.raises(IllegalTransition, match=f"r: {start.value} -> {end.value}"):
            subject.advance(end, 1.0)
        assert subject.state is start


def test_ends_are_final_and_every_other_state_can_end():
    final = {state for state in RequestState if state.is_final}
    assert final == {RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED}
    for state in set(RequestState) - final:
        assert {RequestState.FAILED, RequestState.CANCELLED} <= TRANSITIONS[state]


def test_nothing_returns_once_the_first_token_may_be_out():
    for state in (RequestState.TRANSFERRING, RequestState.DECODING):
        assert RequestState.QUEUED not in TRANSITIONS[state]
        assert RequestState.PREFILLING not in TRANSITIONS[state]
