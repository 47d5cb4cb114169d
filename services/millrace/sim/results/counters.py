"""The counts of the engine while it simulates, handed over at the end of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from millrace.sim.results.histogram import Distribution, Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleEvent:
    """A pool's size from `at_s` on; instances that start or drain are not counted."""

    at_s: float
    pool: str
    instances: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """The counts of one run.

    Seconds are simulated; sums over all requests unless the name says otherwise.
    """

    duration_s: float  # until the last request ended
    requests: int
    finished: int
    refused: int
    failed: int
    events: int  # of simulated time
    steps: int  # events that the scheduler's machine took in
    rounds: int  # of scheduling, those that only a deadline check brought about left out
    commands: int  # sent to instances
    chunks: int
    preemptions: int
    blocking_s: Distribution  # from the signal to stop until the task has stopped
    busy_share: dict[str, float]  # role -> compute seconds / instance-seconds; not of KVP workers
    instance_seconds: dict[str, float]
    prefill_tokens: int  # computed, those of lost attempts included
    balancing_s: float  # of cache balancing that compute did not hide
    handshake_s: float  # of handshakes that compute did not hide
    transfer_wait_s: float  # after the last chunk, for a backend
    transfer_tail_s: float  # after the last chunk, for bytes
    decode_wait_s: float  # for a slot in a full batch
    longest_step_s: float  # of a decode or mixed batch
    kvp_onboardings: int  # KVP workers that contexts reached
    instance_failures: int
    failed_chunks: int  # of instances that have errors
    breaker_openings: int
    scale_events: tuple[ScaleEvent, ...] = ()


@dataclass(slots=True)
class Tally:
    """The engine's running sums, from which `EngineCounters` is made."""

    requests: int = 0
    finished: int = 0
    refused: int = 0
    failed: int = 0
    steps: int = 0
    rounds: int = 0
    commands: int = 0
    chunks: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    balancing_s: float = 0.0
    handshake_s: float = 0.0
    transfer_wait_s: float = 0.0
    transfer_tail_s: float = 0.0
    decode_wait_s: float = 0.0
    longest_step_s: float = 0.0
    kvp_onboardings: int = 0
    instance_failures: int = 0
    failed_chunks: int = 0
    breaker_openings: int = 0
    blocking: Histogram = field(default_factory=Histogram)
    busy_s: dict[str, float] = field(default_factory=dict)
    alive_s: dict[str, float] = field(default_factory=dict)
    scale_events: list[ScaleEvent] = field(default_factory=list)

    def busy(self, role: str, seconds: float) -> None:
        self.busy_s[role] = self.busy_s.get(role, 0.0) + seconds

    def alive(self, role: str, seconds: float) -> None:
        self.alive_s[role] = self.alive_s.get(role, 0.0) + seconds

    def counters(self, duration_s: float, events: int) -> EngineCounters:
        numbers = (one.name for one in fields(self) if one.type in ("int", "float"))
        sums = {name: getattr(self, name) for name in numbers}
        return EngineCounters(
            duration_s=duration_s,
            events=events,
            blocking_s=self.blocking.distribution(),
            busy_share={
                role: self.busy_s.get(role, 0.0) / alive_s if alive_s > 0 else 0.0
                for role, alive_s in sorted(self.alive_s.items())
                if role != "kvp"  # their work is part of their KV owners' steps
            },
            instance_seconds=dict(sorted(self.alive_s.items())),
            scale_events=tuple(self.scale_events),
            **sums,
        )
