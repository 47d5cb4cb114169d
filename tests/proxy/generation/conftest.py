"""A gateway that looks often after its requests."""

from __future__ import annotations

import pytest

from support.gateway import gateway


@pytest.fixture
def short_intervals(monkeypatch):
    monkeypatch.setattr("millrace.proxy.fleet.gateway.WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr("millrace.proxy.fleet.parking.REPORT_INTERVAL_S", 0.05)


@pytest.fixture
async def stack(tmp_path, short_intervals):
    async with gateway(tmp_path) as running:
        yield running
