"""Tracks a prompt in live instances by their reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Set
from dataclasses import dataclass, field

from millrace.core.scheduler.reports import (
    ChunkFinished,
    ChunkStarted,
    DecodeStarted,
    RequestFailed,
    RequestFinished,
    RequestReleased,
    RequestReport,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """The leader's times of a chunk, in seconds. `compute_s` includes the waits."""

    compute_s: float
    ring_wait_s: float
    history_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The times of a prompt, in seconds after its commands: the first chunk's start, the first
    token, and the landing of all K/V at decode.
    """

    chunks: tuple[ChunkTime, ...]
    started_s: float
    ttft_s: float
    landed_s: float

    @property
    def compute_s(self) -> float:
        return sum(chunk.compute_s for chunk in self.chunks)


@dataclass(slots=True, eq=False)
class Underway:
    """A prompt in flight. `holding`: the instances that have not released it."""

    request_id: str
    holding: set[str]
    sent_s: float
    failure: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    started_s: float = 0.0
    ttft_s: float = 0.0
    landed_s: float = 0.0
    chunks: list[ChunkTime] = field(default_factory=list)

    def hear(self, instance_id: str, report: RequestReport) -> None:
        now_s = time.monotonic() - self.sent_s
        match report:
            case ChunkStarted():
                self.started_s = self.started_s or now_s
            case ChunkFinished():
                self.chunks.append(
                    ChunkTime(
                        compute_s=report.compute_s,
                        ring_wait_s=report.ring_wait_s,
                        history_wait_s=report.history_wait_s,
                    )
                )
            case DecodeStarted():
                self.landed_s = now_s
            case RequestFailed():
                self.fail(f"{instance_id}: {report.message}")
            case RequestReleased() | RequestFinished():
                self.lets_go(instance_id)

    def token(self) -> None:
        """Notes that decode sent a token."""
        self.ttft_s = self.ttft_s or time.monotonic() - self.sent_s
        self.changed.set()

    def fail(self, message: str) -> None:
        self.failure = self.failure or message
        self.changed.set()

    def lost(self, message: str) -> None:
        """Fails with the loss of an instance, which explains what the others said before."""
        self.failure = message
        self.changed.set()

    def lets_go(self, instance_id: str) -> None:
        self.holding.discard(instance_id)
        self.changed.set()

    @property
    def is_over(self) -> bool:
        """Whether the first token has come and every instance has released the prompt."""
        return self.ttft_s > 0.0 and not self.holding

    async def over(self) -> None:
        """Waits until the prompt is over or has failed."""
        while not self.is_over and not self.failure:
            self.changed.clear()
            await self.changed.wait()

    async def forgotten(self, holders: Set[str]) -> None:
        """Waits until none of these instances holds the prompt."""
        while self.holding & holders:
            self.changed.clear()
            await self.changed.wait()
