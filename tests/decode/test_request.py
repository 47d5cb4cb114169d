"""The table of a request's states at a decode instance."""

from __future__ import annotations

import re

import pytest

from millrace.core.errors import IntegrityError
from millrace.core.incarnation import Incarnation
from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.core.scheduler.commands import AdmitDecode
from millrace.decode.request import TRANSITIONS, DecodeEvent, DecodeRequest, DecodeState

RELEASABLE = {DecodeState.ENDED, DecodeState.DISCARDED}


def request_in(state: DecodeState) -> DecodeRequest:
    spec = RequestSpec(
        request_id="r",
        proxy=Incarnation("proxy-0", 1),
        prompt_tokens=3,
        sampling=SamplingParams(max_tokens=2),
    )
    request = DecodeRequest.of(AdmitDecode(request=spec), "d0")
    request.state = state
    return request


@pytest.mark.parametrize("state", DecodeState)
@pytest.mark.parametrize("event", DecodeEvent)
def test_advance_follows_the_table(state: DecodeState, event: DecodeEvent) -> None:
    request = request_in(state)
    after = TRANSITIONS.get((state, event))
    if after is not None:
        request.advance(event)
    else:
        message = f"request r: event {event.value!r} in state {state.value!r}"
        with pytest.raises(IntegrityError, match=re.escape(message)):
            request.advance(event)
    assert request.state is (after or state)


def test_every_state_is_reached_and_every_request_can_end() -> None:
    assert {DecodeState.WAITING, *TRANSITIONS.values()} == set(DecodeState)
    for state in DecodeState:
        can_end = (state, DecodeEvent.ENDED) in TRANSITIONS
        assert can_end is not request_in(state).ended
        assert (state in RELEASABLE) is not any(start is state for start, _ in TRANSITIONS)


def test_an_end_is_final_and_a_copy_outlasts_it() -> None:
    for (start, event), after in TRANSITIONS.items():
        before, later = request_in(start), request_in(after)
        assert later.ended or not before.ended
        assert event is DecodeEvent.COPIED or before.is_copying <= later.is_copying


def test_only_whole_and_sound_kv_in_pages_may_be_cached() -> None:
    for (start, event), after in TRANSITIONS.items():
        kept = request_in(after).has_kv
        match event:
            case DecodeEvent.ENDED:
                assert kept is request_in(start).has_kv
            case DecodeEvent.SPOILED:
                assert not kept
            case DecodeEvent.COPIED:
                inwards = (DecodeState.SWAPPING_IN, DecodeState.ENDED_SWAPPING_IN)
                assert kept is (start in inwards)
