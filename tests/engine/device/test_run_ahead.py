"""How far the host runs ahead of a device whose operators take given times."""

from __future__ import annotations

import itertools

import pytest
import torch

from millrace.engine.device.run_ahead import RUN_AHEAD_MS, RUN_AHEAD_OPERATORS, RunAhead


class Timeline:
    """A device that ends operators one after another; the host enqueues them in no time."""

    def __init__(self, durations_ms):
        self.ends_ms = list(itertools.accumulate(durations_ms))
        self.enqueued = 0
        self.waited = 0  # operators for whose end the host has waited

    def event(self, **options):
        assert options == {"enable_timing": True}
        return TimedEvent(self)


class TimedEvent:
    def __init__(self, timeline):
        self._timeline = timeline

    def record(self, stream):
        self.number = self._timeline.enqueued
        self._timeline.enqueued += 1

    def synchronize(self):
        self._timeline.waited = self.number + 1

    def elapsed_time(self, later):
        ends = self._timeline.ends_ms
        return ends[later.number] - ends[self.number]


def unended(monkeypatch, durations_ms):
    """Returns how many operators had not ended after each step."""
    timeline = Timeline(durations_ms)
    monkeypatch.setattr(torch.cuda, "Event", timeline.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    ahead = RunAhead(torch.device("cuda"))
    found = []
    for _ in durations_ms:
        ahead.step()
        found.append(timeline.enqueued - timeline.waited)
    ahead.settle()
    return found


def test_short_operators_leave_a_few_enqueued(monkeypatch):
    assert unended(monkeypatch, [0.05] * 12) == [1, 2, 3, *[RUN_AHEAD_OPERATORS] * 9]


@pytest.mark.parametrize(("longest_ms", "most"), [(0.6, 2), (1.0, 1), (70.0, 1)])
def test_long_ones_leave_as_many_as_end_in_the_time(monkeypatch, longest_ms, most):
    layer = [0.1, longest_ms, 0.1, 0.3, 0.2]
    found = unended(monkeypatch, layer * 4)
    assert set(found[12:]) == {most}
    assert most == 1 or most * longest_ms <= RUN_AHEAD_MS


def test_it_runs_ahead_again_after_long_operators(monkeypatch):
    found = unended(monkeypatch, [0.1, 5.0, 0.1, 0.1, 0.1] * 2 + [0.05] * 20)
    assert found[9] == 1 and found[-1] == RUN_AHEAD_OPERATORS


def test_on_the_cpu_it_records_nothing(monkeypatch):
    monkeypatch.delattr(torch.cuda, "Event")
    ahead = RunAhead(torch.device("cpu"))
    ahead.step()
    ahead.settle()
