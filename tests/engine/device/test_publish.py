"""Layers on their way to their transfers: behind the device's work, in order, and few at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from millrace.engine.device import publish
from millrace.engine.device.publish import TOGETHER_S, LayerPublisher
from support.deadlines import HANG_S


class Device:
    """A device whose work ends when the test says so. It has no work at first."""

    def __init__(self) -> None:
        self.events = 0
        self.idle = threading.Event()
        self.idle.set()

    def event(self, *, blocking: bool) -> Event:
        assert blocking, "a thread that spins takes the interpreter from the compute thread"
        self.events += 1
        return Event(self.idle)


class Event:
    def __init__(self, idle: threading.Event) -> None:
        self._idle = idle
        self._is_recorded = False

    def record(self, stream: object) -> None:
        self._is_recorded = True

    def synchronize(self) -> None:
        assert self._is_recorded
        assert self._idle.wait(HANG_S)


class Clock:
    """In the place of the module `time`: it stands still."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return device


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(publish, "time", clock)
    return clock


@pytest.fixture
def publisher(device: Device, clock: Clock) -> Iterator[LayerPublisher]:
    publisher = LayerPublisher(torch.device("cuda"))
    yield publisher
    device.idle.set()
    publisher.close()


def give(publisher: LayerPublisher, layers: int) -> list[int]:
    """Gives layers to be published together. Returns those that were, now and later."""
    done: list[int] = []
    for layer in range(layers):
        publisher.together(lambda layer=layer: done.append(layer))
    return done


def test_the_layers_of_a_short_pass_go_together(publisher: LayerPublisher, device: Device) -> None:
    done = give(publisher, 32)
    assert device.events == 0
    publisher.flush()
    assert done == list(range(32))
    assert device.events == 1


def test_a_long_pass_gives_its_layers_on_now_and_then(
    publisher: LayerPublisher, device: Device, clock: Clock
) -> None:
    done: list[int] = []
    events = []
    for _ in range(9):
        publisher.together(lambda: done.append(len(done)))
        events.append(device.events)
        clock.now_s += 0.6 * TOGETHER_S
    assert events == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    publisher.flush()
    assert done == list(range(9))


def test_nothing_goes_before_the_device_has_written_it(
    publisher: LayerPublisher, device: Device
) -> None:
    device.idle.clear()
    done = give(publisher, 2)
    flushing = threading.Thread(target=publisher.flush)
    flushing.start()
    flushing.join(0.02)
    assert flushing.is_alive() and not done
    device.idle.set()
    flushing.join(HANG_S)
    assert done == [0, 1]


def test_what_others_wait_for_goes_at_once_and_takes_along_what_was_collected(
    publisher: LayerPublisher,
) -> None:
    done, called = give(publisher, 1), threading.Event()
    publisher.after_device(lambda: (done.append(1), called.set()))
    assert called.wait(HANG_S)
    assert done == [0, 1]


def test_the_end_gives_on_what_was_collected(device: Device, clock: Clock) -> None:
    publisher = LayerPublisher(torch.device("cuda"))
    done = give(publisher, 3)
    publisher.close()
    assert done == [0, 1, 2]


def test_on_the_host_calls_run_at_once() -> None:
    publisher = LayerPublisher(torch.device("cpu"))
    done = give(publisher, 2)
    assert done == [0, 1]
    publisher.after_device(lambda: done.append(2))
    assert done == [0, 1, 2]
    publisher.flush()
    publisher.close()
