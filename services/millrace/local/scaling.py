"""Autoscales a local stack: starts and drains real processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.core.autoscale.rules import (
    AutoscaleConfig,
    DecodeTargets,
    Direction,
    PrefillTargets,
    Targets,
)
from millrace.core.config import ScalingConfig
from millrace.core.errors import ConfigError
from millrace.local.autoscale import Autoscale, Decision, Pool, SchedulerAt
from millrace.local.stack import Stack

log = logging.getLogger(__name__)

#: Seconds that a request waits at the proxy for a pool to wake, without a setting.
PARKING = "proxy.park_timeout_s=120"

_FIXED_SIZES = {"prefill": "2", "decode": "1"}
_SCALED_SIZES = {"prefill": "1:4", "decode": "1:2"}
_TARGETS: Mapping[str, Targets] = {"prefill": PrefillTargets(), "decode": DecodeTargets()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The least and most instances of each role, and the rules of their changes.

    With `to_zero`, an idle pool goes to zero; a request that the proxy parks wakes it.
    """

    sizes: Mapping[str, tuple[int, int]]
    config: ScalingConfig
    to_zero: bool = False
    targets: Mapping[str, Targets] = field(default_factory=lambda: _TARGETS)

    def of(self, role: str) -> AutoscaleConfig:
        """Returns one pool's configuration."""
        low, high = self.sizes[role]
        c = self.config
        return AutoscaleConfig(
            targets=(self.targets[role],),
            min_replicas=low,
            max_replicas=high,
            up=Direction(max_step=c.up_step, period_s=c.up_period_s),
            down=Direction(
                window_s=c.down_window_s,
                max_step=c.down_step,
                period_s=c.down_period_s,
                tolerance=0.2,
            ),
            scale_to_zero=self.to_zero,
            idle_s=c.idle_s,
        )


def parse_sizes(given: Mapping[str, str], *, autoscale: bool) -> dict[str, tuple[int, int]]:
    """Returns least and most instances by role, from `N` or `LOW:HIGH`; empty text: the default.

    Raises ConfigError.
    """
    defaults = _SCALED_SIZES if autoscale else _FIXED_SIZES
    return {role: _size(role, text or defaults[role], autoscale) for role, text in given.items()}


def _size(role: str, text: str, autoscale: bool) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    high = high if colon else low
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise ConfigError(f"--{role} {text!r}: write N or LOW:HIGH, whole numbers from 1 on")
    if colon and not autoscale:
        raise ConfigError(f"--{role} {text!r}: LOW:HIGH needs --autoscale")
    return int(low), int(high)


class LocalConnector:
    """Instances of one role as processes of a running stack: a `Connector`."""

    def __init__(self, stack: Stack, role: str) -> None:
        self.role = role
        self._stack = stack

    def instances(self) -> Sequence[str]:
        return self._stack.instances(self.role)

    def start(self) -> str:
        return self._stack.add(self.role)

    def stop(self, instance_id: str) -> None:
        self._stack.remove(instance_id)


@contextlib.asynccontextmanager
async def autoscaled(
    stack: Stack,
    scaling: Scaling,
    report: Callable[[str], None],
    decided: Callable[[Decision], None] = lambda decision: None,
) -> AsyncIterator[None]:
    """Scales a stack's pools until the end of the block. Raises there the error that ended the
    scaling.

    report: gets a line whenever a pool changes. decided: gets every decision.
    """

    def on_decision(decision: Decision) -> None:
        if decision.recommendation.replicas != decision.size:
            report(str(decision))
        decided(decision)

    scheduler = SchedulerAt(stack.scheduler_address)
    pools = [
        Pool(
            LocalConnector(stack, role),
            scheduler,
            scaling.of(role),
            drain_timeout_s=scaling.config.drain_timeout_s,
            report=report,
        )
        for role in scaling.sizes
    ]
    loop = Autoscale(scheduler, pools, scaling.config.interval_s, on_decision)
    task = asyncio.create_task(loop.run())
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("autoscaling failed; pools keep their sizes", exc_info=error)
