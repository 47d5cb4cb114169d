"""The specification of a simulation: the cluster, its scheduler, and its failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from millrace.core.autoscale.rules import AutoscaleConfig
from millrace.core.config import SchedulerConfig
from millrace.core.cost.profile import Profile
from millrace.core.errors import ConfigError
from millrace.core.instance.packing import PackingConfig
from millrace.core.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An instance dies at `at_s` and is back, empty, as its next incarnation, `down_s` later."""

    at_s: float
    instance_id: str
    down_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFault:
    """A fault of the chunks that a prefill instance begins from `at_s` on, for `for_s`."""

    at_s: float
    instance_id: str
    for_s: float = 30.0

    def is_on(self, now_s: float) -> bool:
        return self.at_s <= now_s < self.at_s + self.for_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors(ChunkFault):
    """The instance lives, but the share `share` of the chunks fails at once, by its error."""

    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness(ChunkFault):
    """The chunks take `factor` times as long as they should. A group is as slow as its slowest
    member.
    """

    factor: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalePlan:
    """Which pools scale, and how fast. Raises ConfigError for a time out of its range."""

    prefill: AutoscaleConfig | None = None
    decode: AutoscaleConfig | None = None
    mixed: AutoscaleConfig | None = None
    interval_s: float = 15.0  # between two checks of the metrics
    start_s: float = 30.0  # from the wish for an instance until it takes work

    def __post_init__(self) -> None:
        if not 0.0 < self.interval_s < math.inf:
            raise ConfigError(f"autoscale.interval_s is {self.interval_s!r}; it must be above 0")
        if not 0.0 <= self.start_s < math.inf:
            raise ConfigError(f"autoscale.start_s is {self.start_s!r}; it must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSpec:
    """A simulated cluster. Raises ConfigError for a value out of its range.

    Instances are named p0, p1, ... (prefill), d0, ... (decode), m0, ... (mixed) and k0, ... (KVP
    workers), and fill nodes of `gpus_per_node` in that order; an instance takes as many GPUs as its
    profile's TP degree, times `spp` if it is mixed. The scheduler decides which requests are spread
    over which workers: `scheduler.max_kv_tokens_per_worker`, `scheduler.max_kvp_degree`.
    """

    profile: Profile  # of prefill and mixed instances
    decode_profile: Profile | None = None  # None: the same
    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    kvp: int = 0  # workers that hold shards of long requests, and nothing else
    gpus_per_node: int = 8
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    weights: Weights = field(default_factory=Weights)  # of classes and tenants

    max_chunk_tokens: int = 0  # of a prefill's forward pass; 0: chunks are not cut
    prefill_kv_tokens: int = 400_000
    decode_kv_tokens: int = 2_000_000  # mixed instances: theirs
    kvp_kv_tokens: int = 2_000_000  # of a KVP worker
    page_tokens: int = 16
    max_context_tokens: int = 16_000_000
    max_batch: int = 256
    backends: int = 16  # requests that may transfer to one decode instance at once
    transfer_backend: str = "rdma"  # between nodes, a key of the profile's `kv_transfer_bytes_s`
    receive_links: int = 8  # senders of one request that a decode instance takes in at full speed
    handshake_s: float = 0.001

    spp: int = 1  # pipeline stages of a mixed instance (Mnemosyne section 4.3)
    packing: PackingConfig | None = None  # of mixed instances

    control_s: float = 0.0005  # from the scheduler to an instance, and back
    noise: float = 0.0  # sigma of the lognormal factor between predicted and true prefill times
    failures: tuple[Failure, ...] = ()
    errors: tuple[Errors, ...] = ()
    slowness: tuple[Slowness, ...] = ()
    autoscale: AutoscalePlan | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_ranges()
        for failure in self.failures:
            if not (failure.at_s >= 0 and failure.down_s > 2 * self.control_s):
                raise ConfigError(
                    f"a failure of {failure.instance_id} has at_s {failure.at_s!r} and down_s "
                    f"{failure.down_s!r}; they must be at least 0 and more than twice control_s"
                )
            if failure.instance_id not in self.instance_ids:
                raise ConfigError(
                    f"failure.instance_id is {failure.instance_id!r}; it must be one of "
                    f"{self.instance_ids[0]} to {self.instance_ids[-1]}"
                )
        for one in self.errors:
            _check_span("errors", one, self.prefill)
            if not 0.0 < one.share <= 1.0:
                raise ConfigError(f"errors.share is {one.share!r}; it must be above 0, at most 1")
        for slow in self.slowness:
            _check_span("slow", slow, self.prefill)
            if not 1.0 <= slow.factor < math.inf:
                raise ConfigError(f"slow.factor is {slow.factor!r}; it must be at least 1")

    def _check_counts(self) -> None:
        apart = self.prefill > 0 and self.decode > 0
        if min(self.prefill, self.decode, self.mixed, self.kvp) < 0 or not (apart or self.mixed):
            raise ConfigError(
                f"sim has {self.prefill} prefill, {self.decode} decode and {self.mixed} mixed "
                "instances; it must have prefill and decode, or mixed ones"
            )
        if self.mixed and self.packing is None:
            raise ConfigError("sim.packing is None; mixed instances need it")
        if self.spp > 1 and not self.mixed:
            raise ConfigError(
                f"sim.spp is {self.spp}; mixed instances alone have stages, and there are none"
            )

    def _check_ranges(self) -> None:
        for name, least in (
            ("gpus_per_node", 1),
            ("max_chunk_tokens", 0),
            ("prefill_kv_tokens", 1),
            ("decode_kv_tokens", 1),
            ("kvp_kv_tokens", 1),
            ("page_tokens", 1),
            ("max_context_tokens", 1),
            ("max_batch", 1),
            ("backends", 1),
            ("receive_links", 1),
            ("spp", 1),
            ("handshake_s", 0),
            ("control_s", 0),
            ("noise", 0),
        ):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ConfigError(f"sim.{name} is {value!r}; it must be at least {least}")
        rates = self.profile.kv_transfer_bytes_s
        if self.transfer_backend not in rates:
            raise ConfigError(
                f"sim.transfer_backend is {self.transfer_backend!r}; it must be one of "
                + ", ".join(sorted(rates))
            )

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """All instances that serve from the start."""
        return tuple(
            f"{letter}{index}"
            for letter, count in (
                ("p", self.prefill),
                ("d", self.decode),
                ("m", self.mixed),
                ("k", self.kvp),
            )
            for index in range(count)
        )

    @property
    def decoding(self) -> Profile:
        """Returns the profile of decode instances."""
        return self.decode_profile or self.profile

    @property
    def kv_bytes_s(self) -> float:
        """Returns the bytes per second of one worker's KV to another, on another node."""
        return self.profile.kv_transfer_bytes_s[self.transfer_backend]


def _check_span(name: str, one: ChunkFault, prefill: int) -> None:
    if one.instance_id not in {f"p{index}" for index in range(prefill)}:
        raise ConfigError(
            f"{name}.instance_id is {one.instance_id!r}; it must be a prefill instance, of which "
            f"there are {prefill}, named p0, p1, ..."
        )
    if not (0.0 <= one.at_s < math.inf and 0.0 < one.for_s < math.inf):
        raise ConfigError(
            f"{name} of {one.instance_id} has at_s {one.at_s!r} and for_s {one.for_s!r}; they must "
            "be at least 0 and above 0"
        )
