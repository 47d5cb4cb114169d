"""A real operator with kopf on an emulated API server, with short times."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kubernetes.aio import client

from millrace.core.backoff import Backoff
from millrace_operator.run import crds, handlers, load, runner
from millrace_operator.run.election import Terms
from millrace_operator.run.operator import Operator, Options
from millrace_operator.run.queue import Pace
from millrace_operator.spec import Defaults
from support import metrics
from support.deadlines import HANG_S, eventually
from support.kube_emulator import KubeEmulator, configuration_of

TERMS = Terms(lease_s=2 * HANG_S, renew_s=80.0, retry_s=0.05)
PACE = Pace(gap_s=0.02, retry=Backoff(0.02, 0.5, spread=0.0), event_retry_s=0.1)
ROUNDS = "millrace_operator_reconcile_rounds_total"
NOBODY = "127.0.0.1:1"


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens waits that are not options."""
    monkeypatch.setattr(runner, "DRAIN_S", 0.05)
    monkeypatch.setattr(runner, "SERVICE_S", 1.0)
    monkeypatch.setattr(load, "INSTANCES_FRESH_S", 0.0)
    monkeypatch.setattr(load, "SILENCE_S", 0.05)
    monkeypatch.setattr(crds, "RETRY_S", 0.05)
    settings = handlers.make_settings()
    settings.networking.error_backoffs = [0.01]
    monkeypatch.setattr(handlers, "make_settings", lambda: settings)
    monkeypatch.setattr(handlers, "STOP_S", 0.5)


class LiveOperator(Operator):
    """A running operator. `ended` is set when it has ended by itself."""

    def __init__(self, options: Options, configuration: client.Configuration) -> None:
        super().__init__(options, configuration)
        self.ended = asyncio.Event()

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self.ended.set()


@asynccontextmanager
async def operator(
    emulator: KubeEmulator, *, scheduler: str = NOBODY, identity: str = "a", **more: Any
) -> AsyncIterator[LiveOperator]:
    """Runs an operator. Leaving the block stops it as SIGTERM does; a failed operator fails the
    test.
    """
    roles = ("proxy", "scheduler", "prefill", "decode", "kvp")

    async def configuration() -> client.Configuration:
        return configuration_of(emulator)

    options = Options(
        configuration=configuration,
        defaults=Defaults(images={role: f"millrace-{role}:1" for role in roles}),
        identity=identity,
        host="127.0.0.1",
        metrics_port=0,
        address=lambda namespace, service: scheduler,
        terms=TERMS,
        pace=PACE,
        **more,
    )
    running = LiveOperator(options, configuration_of(emulator))
    task = asyncio.create_task(running.run())
    try:
        yield running
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def total(running: Operator, metric: str, **labels: str) -> float:
    return metrics.total(running.registry, metric, **labels)


async def rounds(running: Operator, count: int) -> None:
    """Waits until the operator has made `count` more passes."""
    wanted = total(running, ROUNDS) + count
    await eventually(lambda: total(running, ROUNDS) >= wanted)
