"""An emulated API server, a real scheduler, and short waits, for a running operator."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from support.deadlines import HANG_S
from support.kube_emulator import KubeEmulator, kube_emulator
from support.live_operator import hurry
from support.scheduler_peers import Net, quick, scheduler


@pytest.fixture
def no_watch_goes_on() -> Iterator[None]:
    """A thread of kopf that stays would disturb all later tests."""
    yield
    for thread in threading.enumerate():
        if thread.name == "kopf":
            thread.join(HANG_S)
            assert not thread.is_alive()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
async def cluster() -> AsyncIterator[KubeEmulator]:
    async with kube_emulator() as emulator:
        yield emulator


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    async with scheduler(quick()) as running:
        yield running
