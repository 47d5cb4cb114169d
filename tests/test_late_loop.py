"""The loop of `pytest --late` delays the events of sockets and loses none."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from support import late_loop

LINES = [b"%d\n" % number for number in range(20)]


async def talk() -> list[bytes]:
    """Sends the lines one by one; returns what came."""
    ends = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
    (_, there), (here, _) = ends
    found = []
    for line in LINES:
        there.write(line)
        found.append(await here.readline())
    for _, writer in ends:
        writer.close()
        await writer.wait_closed()
    return found


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_events_come_late_and_all_come(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(late_loop, "LATE", share)
    monkeypatch.setattr(late_loop, "STALLS", 0.0)
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)  # of the loop, while all events are late
    with asyncio.Runner(loop_factory=late_loop.LateLoop) as runner:
        assert runner.run(talk()) == LINES
    assert bool(pauses) == (share > 0)
