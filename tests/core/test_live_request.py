"""Only one module writes to a request, and a request notes each event."""

from __future__ import annotations

import sys

import pytest

from millrace.core import live_request as module
from millrace.core.live_request import LiveRequest
from millrace.core.request import Request, RequestState
from support.core_events import Bench, instance
from support.live_requests import live_request


def test_its_own_module_alone_writes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is computed, suspended by another, loses its instance, and is decoded."""
    written: set[str] = set()

    def checked(self: LiveRequest, name: str, value: object) -> None:
        assert sys._getframe(1).f_globals["__name__"] == module.__name__, name
        written.add(name)
        object.__setattr__(self, name, value)

    monkeypatch.setattr(LiveRequest, "__setattr__", checked)
    one = Bench(instance("p0"), instance("p1"), instance("d0"))
    one.submit("a", 1000)
    one.chunk_started("p0", "a")
    one.now_s += 0.25
    one.submit("b", 100, ttft_s=0.2)
    one.chunk_started("p1", "b")
    one.computed("p1", "b")
    one.decoding("d0", "b")
    one.landed("a", 500)
    one.died("p0")
    one.chunk_started("p1", "a")
    one.computed("p1", "a")
    one.decoding("d0", "a")
    for name in ("a", "b"):
        one.finished("d0", name)
    assert not one.machine.requests
    assert {"state", "deadline_s", "executed_s", "decode_id", "chunks"} <= written


def test_what_was_asked_never_changes() -> None:
    asked = Request(id="r", proxy_id="x", prompt_tokens=5, max_new_tokens=7)
    with pytest.raises(AttributeError):
        asked.prompt_tokens = 6  # type: ignore[misc]
    assert LiveRequest(asked).spec is asked


def test_the_first_token_is_out_in_the_first_state_that_has_one() -> None:
    request = live_request(state=RequestState.PREFILLING)
    request.advance(RequestState.TRANSFERRING, 2.0)
    request.advance(RequestState.DECODING, 3.0)
    assert request.first_token_s == 2.0
    again = live_request(state=RequestState.PREFILLING)
    again.advance(RequestState.QUEUED, 1.0)
    assert again.first_token_s is None


def test_the_overhead_of_a_first_token_is_told_once_per_attempt() -> None:
    request = live_request(prompt_tokens=8)
    request.send((), 1.0)
    assert request.take_overhead_s() is None
    request.computed_in_one_span(0.5)
    request.start_decode(1.75)
    assert request.take_overhead_s() == 0.25
    assert request.take_overhead_s() is None
