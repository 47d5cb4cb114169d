"""A full queue takes what would be in time nonetheless, up to a bound."""

from __future__ import annotations

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.scheduler.effects import Place, Refuse
from support.core_events import Bench, instance, of

#: A prompt takes 0.1 s, and a request 8 pages.
PAGES = 100_000


def full(policy: str = "millrace", *, pages: int = PAGES, ttft_s: float | None = None, **limits):
    """One instance that computes a prompt, and a queue at its limit: two more wait."""
    config = SchedulerConfig(
        policy=policy, tasks_ahead=1, batch_tokens=0, **(limits or {"max_queue_requests": 2})
    )
    bench = Bench(instance("p0"), instance("d0", pages=pages), config=config)
    for name in ("a", "b", "c"):
        bench.submit(name, ttft_s=ttft_s)
    assert bench.machine.queued == 2
    return bench


def accepts(bench: Bench, name: str, ttft_s: float | None, prompt: int = 100) -> bool:
    found = bench.submit(name, prompt, ttft_s=ttft_s)
    refused = of(Refuse, found)
    assert all(one.code == "overloaded" and one.retry_after_s >= 1.0 for one in refused)
    assert (name in bench.machine.requests) is not bool(refused)
    return not refused


@pytest.mark.parametrize("limits", [{"max_queue_requests": 2}, {"max_queue_s": 0.2}])
def test_a_full_queue_takes_a_request_that_would_be_in_time(limits):
    bench = full(**limits)
    assert not accepts(bench, "no objective", None)
    assert not accepts(bench, "too late in any case", 0.05)
    found = bench.submit("d", ttft_s=0.5)
    assert not of(Refuse, found)
    assert of(Place, found)[0].predicted_ttft_s == pytest.approx(0.1)  # before those that wait


def test_the_queue_is_bounded_in_requests_whatever_is_stated():
    bench = full()
    taken = [accepts(bench, f"r{number}", 1.0, prompt=1) for number in range(9)]
    assert taken == [True] + [False] * 8
    assert len(bench.machine.requests) == 4  # one of them at the instance


@pytest.mark.parametrize(("more", "taken"), [(4, True), (5, False)])
def test_the_queue_is_bounded_in_seconds_whatever_is_stated(more, taken):
    bench = full(max_queue_s=0.2)
    assert all(accepts(bench, f"r{number}", 5.0, prompt=60) for number in range(more))
    assert bench.machine.queued_s == pytest.approx(0.2 + 0.06 * (more - 1))  # one is computed
    assert accepts(bench, "urgent", 0.3, prompt=50) is taken


def test_work_that_goes_before_counts():
    bench = full("edf", ttft_s=1.0)
    assert not accepts(bench, "after all", 100.0)
    assert accepts(bench, "before all", 0.5)


def test_it_must_be_in_time_after_the_work_before_it():
    bench = full("edf", ttft_s=1.0, max_queue_s=0.2)
    assert accepts(bench, "first", 0.3, prompt=200)
    assert accepts(bench, "in time", 0.5)
    assert not accepts(bench, "late by the first", 0.31, prompt=150)


def test_first_come_first_served_has_all_before_a_new_one():
    bench = full("fcfs")
    assert not accepts(bench, "d", 100.0)


def test_a_queue_for_room_at_decode_takes_no_more():
    bench = full(pages=24, max_queue_s=0.2)
    assert accepts(bench, "d", 1.0)  # the instance has no room for it
    assert bench.machine.queued == 3
    assert not accepts(bench, "e", 1.0)
