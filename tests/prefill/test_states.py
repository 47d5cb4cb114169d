"""The table of a request's states at a prefill instance, walked on a real job."""

from __future__ import annotations

import itertools

import pytest

from millrace.core.errors import IntegrityError, TransferError
from millrace.core.scheduler.commands import Member
from millrace.prefill.job import Cancelled, PrefillJob
from millrace.prefill.states import TRANSITIONS, PrefillEvent, PrefillState
from support.worker_roles import PROXY, run_prefill, spec


def job(state: PrefillState = PrefillState.PREPARING) -> PrefillJob:
    command = run_prefill(spec("r", 20), Member(incarnation=PROXY, address="h:1"))
    made = PrefillJob.of(command, "p0")
    made.state = state
    return made


def test_each_event_takes_the_tables_step_or_is_refused() -> None:
    for state, event in itertools.product(PrefillState, PrefillEvent):
        one, after = job(state), TRANSITIONS.get((state, event))
        if after is not None:
            assert one.advance(event) is state
        else:
            said = f"^request r: event {event.value} in state {state.value}$"
            with pytest.raises(IntegrityError, match=said):
                one.advance(event)
        assert one.state is (after or state)


def test_every_state_can_be_reached_and_left_for_the_release() -> None:
    after = {
        state: {
            TRANSITIONS[state, event] for event in PrefillEvent if (state, event) in TRANSITIONS
        }
        for state in PrefillState
    }

    def reached_from(state: PrefillState) -> set[PrefillState]:
        found, new = {state}, [state]
        while new:
            new = [one for one in set().union(*(after[s] for s in new)) if one not in found]
            found.update(new)
        return found

    assert reached_from(PrefillState.PREPARING) == set(PrefillState)
    assert all(PrefillState.RELEASED in reached_from(state) for state in PrefillState)
    assert [state for state in PrefillState if not after[state]] == [PrefillState.RELEASED]


def test_the_first_reason_counts_but_a_cancel_hides_a_failure() -> None:
    one = job()
    one.fail(TransferError("first"))
    one.fail(TransferError("second"))
    assert str(one.failure) == "first"
    one.cancel("enough")
    one.cancel("again")
    one.fail(TransferError("third"))
    assert isinstance(one.failure, Cancelled) and str(one.failure) == "enough"
    assert one.state is PrefillState.CANCELLED
