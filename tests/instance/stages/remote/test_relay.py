"""Pipes whose two ends are joined by a stream of frames."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest

from millrace.engine.pipeline.messages import Step
from millrace.instance.stages.remote.relay import Frame, Relay
from support.deadlines import HANG_S


class Joined:
    """Two relays, each the stream of the other; `here` and `there` are the ends that are used."""

    def __init__(self, channels: int) -> None:
        pairs = [Pipe() for _ in range(2 * channels)]
        self.here = [own for own, _ in pairs[:channels]]
        self.there = [own for own, _ in pairs[channels:]]
        ready = threading.Event()

        def to_there(frame: Frame) -> None:
            ready.wait()
            self.two.receive(frame)

        self.one = Relay([other for _, other in pairs[:channels]], to_there)
        self.two = Relay([other for _, other in pairs[channels:]], self.one.receive)
        ready.set()

    def close(self) -> None:
        for relay in (self.one, self.two):
            relay.close()
        for pipe in (*self.here, *self.there):
            pipe.close()


@pytest.fixture
def joined() -> Iterator[Joined]:
    made = Joined(2)
    yield made
    made.close()


def read(pipe: Connection) -> object:
    assert pipe.poll(HANG_S)
    return pipe.recv()


def test_messages_come_in_order_on_every_channel(joined: Joined) -> None:
    for number in range(100):
        joined.here[number % 2].send(Step(number))
        joined.there[0].send((number, np.arange(number)))
    assert [read(joined.there[number % 2]) for number in range(100)] == list(map(Step, range(100)))
    for number in range(100):
        found = read(joined.here[0])
        assert isinstance(found, tuple)
        assert (found[0], len(found[1])) == (number, number)


def test_a_channel_that_nobody_reads_holds_up_no_other(joined: Joined) -> None:
    for _ in range(50):
        joined.here[0].send(bytes(100_000))  # far more than the pipes hold
    joined.here[1].send(Step(1))
    assert read(joined.there[1]) == Step(1)
    assert all(read(joined.there[0]) == bytes(100_000) for _ in range(50))


@pytest.mark.parametrize("ends_here", [True, False])
def test_an_end_is_told_after_what_was_sent_before(joined: Joined, ends_here: bool) -> None:
    near, far = (joined.here, joined.there) if ends_here else (joined.there, joined.here)
    near[0].send(Step(1))
    near[0].close()
    assert read(far[0]) == Step(1)
    with pytest.raises(EOFError):
        read(far[0])
    near[1].send(Step(2))  # the other channel goes on
    assert read(far[1]) == Step(2)


def test_the_loss_of_the_stream_ends_all_channels(joined: Joined) -> None:
    joined.here[0].send(Step(1))
    assert read(joined.there[0]) == Step(1)
    joined.two.end()
    for pipe in joined.there:
        with pytest.raises(EOFError):
            read(pipe)
    for pipe in joined.here:  # told by the other relay
        with pytest.raises(EOFError):
            read(pipe)


def test_what_is_no_message_ends_its_channel(
    joined: Joined, caplog: pytest.LogCaptureFixture
) -> None:
    joined.here[0].send(Step)  # a class: a pipe takes any object
    with pytest.raises(EOFError):
        read(joined.there[0])
    joined.two.receive(Frame(1, b"nonsense"))
    with pytest.raises(EOFError):
        read(joined.there[1])
    assert "channel 0 ends: no message has a type" in caplog.text
    assert "channel 1 ends: not a message between stages" in caplog.text
