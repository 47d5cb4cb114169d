"""How far the host runs ahead of a device whose operators take given times."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pytest
import torch

from millrace.engine.device.run_ahead import RUN_AHEAD_MS, RUN_AHEAD_OPERATORS, Pace, RunAhead

LATE_MS = 0.11  # the host looks every 0.1 ms


class Device:
    """Runs operators one after another, on a clock that goes on while the host waits."""

    def __init__(self, durations_ms: Iterator[float]) -> None:
        self.durations_ms = durations_ms
        self.now_ms = 0.0
        self.ends_ms: list[float] = []

    def event(self, **options):
        assert options == {"enable_timing": True}
        return Event(self)

    def now_s(self) -> float:
        return self.now_ms / 1e3

    def sleep(self, seconds: float) -> None:
        self.now_ms += max(1e3 * seconds, 1e-3)

    @property
    def ahead_ms(self) -> float:
        return max(0.0, self.ends_ms[-1] - self.now_ms)

    @property
    def enqueued(self) -> int:
        return sum(end_ms > self.now_ms + 1e-9 for end_ms in self.ends_ms)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self, stream):
        device = self._device
        begins_ms = max([device.now_ms, *device.ends_ms[-1:]])
        self.end_ms = begins_ms + next(device.durations_ms)
        device.ends_ms.append(self.end_ms)

    def query(self):
        return self.end_ms <= self._device.now_ms

    def synchronize(self):
        self._device.now_ms = max(self._device.now_ms, self.end_ms)

    def elapsed_time(self, later):
        return later.end_ms - self.end_ms


class Host:
    """Enqueues layers at a device that takes these times; it takes no time itself."""

    def __init__(self, monkeypatch, durations_ms: Iterable[float]) -> None:
        self.device = Device(iter(durations_ms))
        monkeypatch.setattr(torch.cuda, "Event", self.device.event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        self.ahead = RunAhead(
            torch.device("cuda"), now_s=self.device.now_s, sleep=self.device.sleep
        )

    def enqueue(self, layers: int, operators: int, pace: Pace) -> list[tuple[float, int]]:
        """Returns what is left, in milliseconds and in operators, when the next may go."""
        found = []
        for number in range(layers * operators):
            pace.operator = f"operator {number % operators}"
            self.ahead.step(pace)
            found.append((self.device.ahead_ms, self.device.enqueued))
        return found


@pytest.mark.parametrize("operator_ms", [0.1, 0.3, 0.5])
def test_a_time_of_operators_is_enqueued_however_many_they_are(monkeypatch, operator_ms):
    found = Host(monkeypatch, [operator_ms] * 80).enqueue(40, 2, Pace())
    settled = found[40:]
    assert max(ms for ms, _ in settled) <= RUN_AHEAD_MS + 1e-9
    assert min(ms for ms, _ in settled) > RUN_AHEAD_MS - operator_ms - LATE_MS


def test_the_number_of_operators_is_bounded_too(monkeypatch):
    found = Host(monkeypatch, [0.001] * 200).enqueue(100, 2, Pace())
    assert max(number for _, number in found) == RUN_AHEAD_OPERATORS
    assert found[-1][1] == RUN_AHEAD_OPERATORS


@pytest.mark.parametrize("longest_ms", [0.6, 1.0, 2.0, 70.0])
def test_the_time_is_kept_among_long_and_short_operators(monkeypatch, longest_ms):
    layer = [0.1, longest_ms, 0.1, 0.3, 0.2]
    found = Host(monkeypatch, layer * 8).enqueue(8, 5, Pace())
    assert max(ms for ms, _ in found[20:]) <= RUN_AHEAD_MS + 1e-9
    assert min(ms for ms, _ in found[20:]) > RUN_AHEAD_MS - 0.3 - LATE_MS  # or the device may idle


def test_a_long_operator_ends_in_part_before_the_next_is_enqueued(monkeypatch):
    """So the next task waits for what is left of one, and for one in full, at most."""
    found = Host(monkeypatch, [2.6] * 40).enqueue(20, 2, Pace())
    assert all(RUN_AHEAD_MS - LATE_MS < ms <= RUN_AHEAD_MS for ms, _ in found[12:])


def test_who_is_asked_to_stop_does_not_wait(monkeypatch):
    host = Host(monkeypatch, [2.6] * 40)
    host.enqueue(10, 2, pace := Pace())
    before_ms = host.device.now_ms
    host.ahead.step(pace, is_asked=lambda: host.device.now_ms > before_ms + 0.5)
    assert 0.5 < host.device.now_ms - before_ms < 0.5 + LATE_MS


def test_a_long_operator_that_ends_early_is_not_waited_for(monkeypatch):
    host = Host(monkeypatch, [*[2.6] * 16, 0.05, 2.6])
    host.enqueue(8, 2, pace := Pace())
    host.ahead.step(pace)
    assert host.device.now_ms - host.device.ends_ms[-1] < LATE_MS  # of 1.1 ms


def test_a_pass_goes_on_with_what_was_known_of_it(monkeypatch):
    host = Host(monkeypatch, itertools.chain([2.0] * 20, [0.01] * 4, [2.0] * 20))
    long, short = Pace(rows=8192), Pace(rows=16)
    host.enqueue(10, 2, long)
    host.enqueue(2, 2, short)
    found = host.enqueue(10, 2, long)
    assert max(ms for ms, _ in found) <= RUN_AHEAD_MS + 0.04 + LATE_MS  # and the short ones


def test_a_new_pass_is_expected_to_take_as_long_as_earlier_ones_by_its_rows(monkeypatch):
    host = Host(monkeypatch, itertools.chain([0.25] * 20, [2.0] * 20, [0.002] * 40))
    host.enqueue(10, 2, Pace(rows=1024))
    found = host.enqueue(10, 2, Pace(rows=8192))
    assert max(ms for ms, _ in found) <= RUN_AHEAD_MS + LATE_MS
    host.device.now_ms = begun_ms = host.device.ends_ms[-1]
    host.enqueue(1, 2, Pace(rows=8))
    assert host.device.now_ms == begun_ms  # nothing waits in the first layer


def test_an_operator_in_more_slices_than_before_is_known(monkeypatch):
    """Attention is cut into more slices as the history grows; what comes after is as before."""
    times_ms = {"qkv": 0.1, "attn_rows": 2.0, "attn": 1.9, "gate_up": 2.6, "down": 1.3}

    def layer(slices: int) -> list[str]:
        return ["qkv", *["attn_rows"] * slices, "attn", "gate_up", "down"]

    names = [*layer(1) * 4, *layer(3) * 4]
    host = Host(monkeypatch, [times_ms[name] for name in names])
    pace, found = Pace(), []
    for pace.operator in names:
        host.ahead.step(pace)
        found.append(host.device.ahead_ms)
    assert max(found[20:]) <= RUN_AHEAD_MS + 1e-9


def test_what_nothing_is_known_of_counts_a_quarter(monkeypatch):
    found = Host(monkeypatch, [4.0] * 40).enqueue(20, 2, Pace())
    assert max(number for _, number in found) == 5
    assert max(number for _, number in found[16:]) == 1


def test_another_process_on_the_gpu_shortens_nothing(monkeypatch):
    """It takes the GPU for 6 ms, again and again; the next operator seems to take as long."""
    layers = [[0.1, 0.1] for _ in range(60)]
    for number in range(0, 60, 2):
        layers[number][number // 2 % 2] += 6.0
    found = Host(monkeypatch, itertools.chain(*layers)).enqueue(60, 2, Pace())
    assert min(number for _, number in found[40:]) >= 12


def test_a_task_that_is_over_leaves_nothing(monkeypatch):
    host = Host(monkeypatch, [0.4] * 20)
    host.enqueue(4, 2, pace := Pace())
    host.ahead.settle()
    before_ms = host.device.now_ms
    host.ahead.step(pace)
    assert host.device.now_ms == before_ms


def test_on_the_cpu_it_records_nothing(monkeypatch):
    monkeypatch.delattr(torch.cuda, "Event")
    ahead = RunAhead(torch.device("cpu"))
    ahead.step(Pace())
    ahead.settle()
