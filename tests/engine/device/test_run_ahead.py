"""How far the host runs ahead of a device whose operators take given times."""

from __future__ import annotations

import itertools

import pytest
import torch

from millrace.core.instance.stop_point import StopPoint
from millrace.engine.device.run_ahead import RUN_AHEAD_MS, RUN_AHEAD_OPERATORS, RunAhead

OPERATOR, LAYER = StopPoint.OPERATOR, StopPoint.LAYER


class Timeline:
    """A device that ends operators one after another; the host enqueues them in no time."""

    def __init__(self, durations_ms):
        self.ends_ms = list(itertools.accumulate(durations_ms))
        self.enqueued = 0
        self.waited = 0  # operators for whose end the host has waited

    def event(self, **options):
        assert options == {"enable_timing": True}
        return TimedEvent(self)

    @property
    def ahead_ms(self):
        ended_ms = self.ends_ms[self.waited - 1] if self.waited else 0.0
        return self.ends_ms[self.enqueued - 1] - ended_ms


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


class Host:
    """Enqueues layers at a device that takes these times."""

    def __init__(self, monkeypatch, durations_ms):
        self.timeline = Timeline(durations_ms)
        monkeypatch.setattr(torch.cuda, "Event", self.timeline.event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        self.ahead = RunAhead(torch.device("cuda"))
        self.ahead.begin()

    def enqueue(self, layers, operators):
        """Returns the milliseconds and the number of operators enqueued after each operator."""
        found = []
        for number in range(1, layers * operators + 1):
            self.ahead.step(OPERATOR if number % operators else LAYER)
            timeline = self.timeline
            found.append((timeline.ahead_ms, timeline.enqueued - timeline.waited))
        return found


@pytest.mark.parametrize("operator_ms", [0.1, 0.3, 0.5])
def test_a_time_of_operators_is_enqueued_however_many_they_are(monkeypatch, operator_ms):
    found = Host(monkeypatch, [operator_ms] * 80).enqueue(40, 2)
    settled = found[40:]
    assert max(ms for ms, _ in settled) <= RUN_AHEAD_MS + 1e-9
    assert min(ms for ms, _ in settled) > RUN_AHEAD_MS - 2 * operator_ms


def test_the_number_of_operators_is_bounded_too(monkeypatch):
    found = Host(monkeypatch, [0.001] * 200).enqueue(100, 2)
    assert max(number for _, number in found) == RUN_AHEAD_OPERATORS
    assert found[-1][1] == RUN_AHEAD_OPERATORS


@pytest.mark.parametrize("longest_ms", [0.6, 1.0, 2.0, 70.0])
def test_the_time_is_kept_among_long_and_short_operators(monkeypatch, longest_ms):
    layer = [0.1, longest_ms, 0.1, 0.3, 0.2]
    found = Host(monkeypatch, layer * 6).enqueue(6, 5)
    assert max(ms for ms, _ in found[10:]) <= max(RUN_AHEAD_MS, longest_ms) + 1e-9
    assert all(number >= 1 for _, number in found)


def test_nothing_is_known_of_a_task_that_begins_or_goes_on(monkeypatch):
    host = Host(monkeypatch, [0.1] * 40 + [4.0] * 40)
    assert host.enqueue(20, 2)[-1][1] > 10
    host.ahead.begin()
    found = host.enqueue(20, 2)
    assert max(number for _, number in found[16:]) == 1
    assert found[4][1] <= 4  # the operators enqueued before count, and unknown ones a quarter


def test_another_process_on_the_gpu_shortens_nothing(monkeypatch):
    """It takes the GPU for 6 ms, again and again; the next operator seems to take as long."""
    layers = [[0.1, 0.1] for _ in range(60)]
    for number in range(0, 60, 2):
        layers[number][number // 2 % 2] += 6.0
    found = Host(monkeypatch, list(itertools.chain(*layers))).enqueue(60, 2)
    assert min(number for _, number in found[40:]) >= 12


def test_a_task_that_is_over_leaves_nothing(monkeypatch):
    host = Host(monkeypatch, [0.4] * 20)
    host.enqueue(4, 2)
    host.ahead.settle()
    waited = host.timeline.waited
    host.ahead.step(OPERATOR)
    assert host.timeline.waited == waited


def test_on_the_cpu_it_records_nothing(monkeypatch):
    monkeypatch.delattr(torch.cuda, "Event")
    ahead = RunAhead(torch.device("cpu"))
    ahead.begin()
    ahead.step(OPERATOR)
    ahead.settle()
