"""Computes how many replicas a pool should have: `Autoscaler.step(metrics, now_s) ->
Recommendation`.

Pure: every driver, live or simulated, calls the same object. Not from a paper; the averaging over
stabilisation windows and the ceil(replicas x measured / target) rule are those of Kubernetes'
HorizontalPodAutoscaler (its documentation, "Algorithm details"), deviations below.

Signals per pool. With several signals, the largest wish counts.

- prefill: predicted seconds of waiting and running work per instance (`backlog_s` covers the pool;
  a count of requests tells nothing when one prompt takes a thousand times as long as another), the
  predicted seconds that arrive per second (`arriving`), TTFT over its objective;
- decode: share of KV slots in use, TBT over its objective;
- kvp: the workers that the contexts need, as long as they will be after the lead time (see `kvp`),
  and warm spares.

Rules, in this order:

1. Stale metrics change nothing. The size that is held meanwhile counts as the wish, so that
   scale-in waits for a whole window after metrics come back.
2. A measured ratio within the dead band of its target wishes for the present size. Starting
   replicas are capacity. A signal that counts whole workers (kvp) has no band.
3. Up: the least wish of the up window. Down: the largest wish of the down window, which starts with
   the size found at the first step, so that a restart of the driver scales nothing in.
4. At most `max_step` replicas within `period_s`, each way (a limit per step would depend on how
   often the driver calls).
5. Minimum, maximum and quota. The quota never removes running replicas.
6. To zero after `idle_s` without a request; a parked request wakes the pool at once, even when
   metrics are stale.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import ConfigError
from millrace.core.kv.kvp_shards import degree


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        wanted = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        raise ConfigError(f"autoscale.{name} is {value!r}; it must be {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A request as a KVP pool sees it; a request that waits for workers counts at its final
    length."""

    tokens: int  # tokens now
    final_tokens: int  # what it may grow to at most
    growth_tokens_s: float = 0.0  # prefill or decode speed
    owner_tokens: int = 0  # of its first positions, held at the decode instance

    def tokens_after(self, seconds: float) -> int:
        """Returns the tokens of the request that the pool will hold in `seconds`."""
        grown = math.ceil(self.tokens + self.growth_tokens_s * seconds)
        return max(min(grown, self.final_tokens) - self.owner_tokens, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMetrics:
    """One sample of a pool. None stands for a signal that was not measured; it is ignored."""

    sampled_s: float  # when, by the clock of `now_s`
    ready: int
    starting: int = 0  # asked for and not ready yet, whether or not a pod exists
    draining: int = 0
    active_requests: int = 0  # placed in the pool, or waiting for it
    parked_requests: int = 0  # held back at the proxies until the pool wakes
    backlog_s: float | None = None  # predicted seconds of work not yet computed, over the pool
    arriving: float | None = None  # predicted seconds of work that arrive per second
    #: TTFT over its objective, of the worst class. Requests whose prefill alone takes longer than
    #: their objective are left out: no number of replicas helps them.
    ttft_slo_ratio: float | None = None
    kv_utilisation: float | None = None  # of ready replicas; above 1 where requests wait for room
    tbt_slo_ratio: float | None = None
    contexts: tuple[Context, ...] = ()
    quota: int | None = None  # replicas that the GPU quota has room for, those of the pool included

    @property
    def capacity(self) -> int:
        """Returns the replicas that serve or are starting."""
        return self.ready + self.starting


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The number of replicas that one signal asks for."""

    replicas: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """How fast a pool may grow, or how fast it may shrink."""

    window_s: float = 0.0
    max_step: int = 2
    period_s: float = 15.0
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        _check("window_s", self.window_s, 0.0, math.inf)
        _check("max_step", self.max_step, 1, math.inf)
        _check("period_s", self.period_s, 0.0, math.inf)
        _check("tolerance", self.tolerance, 0.0, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTargets:
    """The targets of a prefill pool."""

    backlog_s: float = 4.0  # seconds of work per instance
    utilisation: float = 0.8  # seconds of work that arrive per instance and second
    ttft_slo_ratio: float = 0.8

    def __post_init__(self) -> None:
        _check("targets.backlog_s", self.backlog_s, 1e-3, math.inf)
        _check("targets.utilisation", self.utilisation, 0.05, 1.0)
        _check("targets.ttft_slo_ratio", self.ttft_slo_ratio, 0.05, 1.0)

    def wishes(self, m: PoolMetrics, config: AutoscaleConfig) -> list[Wish]:
        """Returns the wishes.

        `backlog_s` and `arriving` are sums over the pool; TTFT is of ready replicas.
        """
        return [
            *_ratio("backlog of {:.3g} s an instance", m.backlog_s, self.backlog_s, m, config),
            *_ratio("load of {:.3g} an instance", m.arriving, self.utilisation, m, config),
            *_ratio(
                "TTFT at {:.3g} of its objective",
                _sum(m, m.ttft_slo_ratio),
                self.ttft_slo_ratio,
                m,
                config,
            ),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTargets:
    """The targets of a decode pool."""

    kv_utilisation: float = 0.8
    tbt_slo_ratio: float = 0.9

    def __post_init__(self) -> None:
        _check("targets.kv_utilisation", self.kv_utilisation, 0.05, 1.0)
        _check("targets.tbt_slo_ratio", self.tbt_slo_ratio, 0.05, 1.0)

    def wishes(self, m: PoolMetrics, config: AutoscaleConfig) -> list[Wish]:
        """Returns the wishes.

        Both signals are of ready replicas: starting replicas share the load later.
        """
        return [
            *_ratio(
                "KV in use at {:.3g}", _sum(m, m.kv_utilisation), self.kv_utilisation, m, config
            ),
            *_ratio(
                "TBT at {:.3g} of its objective",
                _sum(m, m.tbt_slo_ratio),
                self.tbt_slo_ratio,
                m,
                config,
            ),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvpTargets:
    """The targets of a pool of KVP workers."""

    tokens_per_worker: int = 262_144  # of one request (M in `kvp`)
    worker_kv_tokens: int = 0  # of all requests, by a worker's memory; 0: tokens_per_worker
    max_workers_per_request: int = 16
    warm_spares: int = 1
    lead_s: float = 30.0  # from the wish to a ready worker

    def __post_init__(self) -> None:
        _check("targets.tokens_per_worker", self.tokens_per_worker, 1, math.inf)
        _check("targets.worker_kv_tokens", self.worker_kv_tokens, 0, math.inf)
        _check("targets.max_workers_per_request", self.max_workers_per_request, 1, math.inf)
        _check("targets.warm_spares", self.warm_spares, 0, math.inf)
        _check("targets.lead_s", self.lead_s, 0.0, math.inf)

    def wishes(self, m: PoolMetrics, config: AutoscaleConfig) -> list[Wish]:
        """Returns the wishes.

        The longest request needs its degree in different workers; all need the memory.
        """
        del config
        sizes = [context.tokens_after(self.lead_s) for context in m.contexts]
        longest = degree(max(sizes), self.tokens_per_worker) if any(sizes) else 0
        memory = ceil_div(sum(sizes), self.worker_kv_tokens or self.tokens_per_worker)
        needed = max(min(longest, self.max_workers_per_request), memory)
        reason = f"{sum(sizes)} context tokens in {self.lead_s:g} s need {needed} workers"
        return [
            Wish(
                replicas=needed + self.warm_spares,
                reason=f"{reason}, and {self.warm_spares} warm spares",
            )
        ]


Targets = PrefillTargets | DecodeTargets | KvpTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """The limits of one pool. `targets` has one entry, or two for a pool of mixed instances."""

    targets: tuple[Targets, ...]
    min_replicas: int = 1
    max_replicas: int = 8
    up: Direction = Direction()
    down: Direction = Direction(window_s=300.0, max_step=1, period_s=60.0, tolerance=0.2)
    stale_s: float = 30.0  # an older sample is stale
    scale_to_zero: bool = False
    idle_s: float = 600.0  # without a request, before the last replicas go

    def __post_init__(self) -> None:
        _check("min_replicas", self.min_replicas, 0, math.inf)
        _check("max_replicas", self.max_replicas, max(self.min_replicas, 1), math.inf)
        _check("stale_s", self.stale_s, 1e-3, math.inf)
        _check("idle_s", self.idle_s, 0.0, math.inf)
        if not self.targets:
            raise ConfigError("autoscale.targets is (); it must name at least one pool's targets")
        if self.min_replicas == 0 and not self.scale_to_zero:
            raise ConfigError(
                "autoscale.min_replicas is 0; it must be at least 1 unless scale_to_zero is set"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The size to set for the pool. `limited` names the limit that cut the wish of the signals."""

    replicas: int
    reason: str
    limited: bool = False
    wished: int = 0  # by the signals, before windows and limits
    limited_by: str = ""  # "step" | "minimum" | "maximum" | "quota"


@dataclass(slots=True, eq=False)
class AutoscaleState:
    """The state of an autoscaler. After a restart, one window of waiting restores all of it."""

    wishes: deque[tuple[float, int]] = field(default_factory=deque)  # (when, replicas)
    changes: deque[tuple[float, int]] = field(default_factory=deque)  # (when, difference)
    idle_since_s: float | None = None


class Autoscaler:
    """Autoscales one pool. `step` is called at any pace, with times that never run backwards."""

    def __init__(self, config: AutoscaleConfig) -> None:
        self.config = config
        self.state = AutoscaleState()

    def step(self, metrics: PoolMetrics, now_s: float) -> Recommendation:
        """Returns the pool's size from now on, with the reason."""
        stale = now_s - metrics.sampled_s > self.config.stale_s
        idle = self._idle(metrics, now_s, stale)
        wish = self._wish(metrics, now_s, stale, idle)
        self._remember(wish, metrics, now_s)
        if metrics.parked_requests and not metrics.capacity:
            target = max(wish.replicas, 1)  # no window delays a waking pool
        elif idle:
            target = 0
        else:
            target = self._stabilised(metrics.capacity, now_s)
        replicas, limited_by = self._limited(target, metrics, now_s, idle)
        if replicas != metrics.capacity:
            self.state.changes.append((now_s, replicas - metrics.capacity))
        return Recommendation(
            replicas=replicas,
            reason=wish.reason,
            limited=bool(limited_by),
            wished=wish.replicas,
            limited_by=limited_by,
        )

    def _idle(self, metrics: PoolMetrics, now_s: float, stale: bool) -> bool:
        """Returns whether the pool goes to zero, or stays at zero: no request for `idle_s`, and
        none waits.
        """
        busy = metrics.active_requests or metrics.parked_requests or metrics.contexts
        if stale or busy:
            self.state.idle_since_s = None
            asleep = self.config.scale_to_zero and metrics.capacity == 0
            return asleep and stale and not metrics.parked_requests  # stale metrics wake no pool
        if self.state.idle_since_s is None:
            self.state.idle_since_s = now_s
        idle_s = now_s - self.state.idle_since_s
        long_enough = metrics.capacity == 0 or idle_s >= self.config.idle_s
        return self.config.scale_to_zero and long_enough

    def _wish(self, metrics: PoolMetrics, now_s: float, stale: bool, idle: bool) -> Wish:
        if idle:
            return Wish(replicas=0, reason="no request for long")
        if stale:
            age_s = now_s - metrics.sampled_s
            wish = Wish(replicas=metrics.capacity, reason=f"metrics are {age_s:.0f} s old")
        else:
            hold = Wish(replicas=metrics.capacity, reason="no signal")
            wishes = [w for t in self.config.targets for w in t.wishes(metrics, self.config)]
            wish = max(wishes, key=lambda w: w.replicas, default=hold)
        if metrics.parked_requests and not metrics.capacity:
            reason = f"{metrics.parked_requests} parked requests"
            wish = Wish(replicas=max(wish.replicas, 1), reason=reason)
        return wish

    def _remember(self, wish: Wish, metrics: PoolMetrics, now_s: float) -> None:
        up, down, state = self.config.up, self.config.down, self.state
        if not state.wishes:
            state.wishes.append((now_s, metrics.capacity))
        state.wishes.append((now_s, wish.replicas))
        _forget(state.wishes, now_s - max(up.window_s, down.window_s))
        _forget(state.changes, now_s - max(up.period_s, down.period_s))

    def _stabilised(self, capacity: int, now_s: float) -> int:
        """Returns the size nearest to the present size that a wish of both windows allows."""
        up_since_s, down_since_s = (
            now_s - self.config.up.window_s,
            now_s - self.config.down.window_s,
        )
        latest = self.state.wishes[-1][1]  # counts even for a window of no length
        low = min([r for at_s, r in self.state.wishes if at_s > up_since_s], default=latest)
        high = max([r for at_s, r in self.state.wishes if at_s > down_since_s], default=latest)
        return min(max(capacity, low), high)

    def _limited(
        self, target: int, metrics: PoolMetrics, now_s: float, idle: bool
    ) -> tuple[int, str]:
        """Returns `target` within the limits, and the last limit that cut it.

        The configured minimum and maximum apply at once, whatever the step.
        """
        config, capacity = self.config, metrics.capacity
        limited_by = ""
        up_by, down_by = self._steps_left(now_s)
        stepped = min(max(target, capacity - down_by), capacity + up_by)
        if not idle and stepped != target:
            target, limited_by = stepped, "step"
        # A sleeping or waking pool is below its minimum because scale_to_zero allows it.
        least = 0 if idle else max(config.min_replicas, 1)
        room = config.max_replicas
        if target < least:
            target, limited_by = least, "minimum"
        if target > room:
            target, limited_by = room, "maximum"
        if metrics.quota is not None:
            room = max(metrics.quota - metrics.draining, min(capacity, target))
            if target > room:
                target, limited_by = room, "quota"
        return target, limited_by

    def _steps_left(self, now_s: float) -> tuple[int, int]:
        """Returns the replicas that may still be added, and removed, in the current periods."""
        up, down, changes = self.config.up, self.config.down, self.state.changes
        added = sum(d for at_s, d in changes if d > 0 and at_s > now_s - up.period_s)
        removed = -sum(d for at_s, d in changes if d < 0 and at_s > now_s - down.period_s)
        return max(up.max_step - added, 0), max(down.max_step - removed, 0)


def _ratio(
    what: str, total: float | None, target: float, m: PoolMetrics, config: AutoscaleConfig
) -> list[Wish]:
    """Returns the wish of a signal with the sum `total` over the pool and `target` per replica."""
    if total is None:
        return []
    capacity = m.capacity
    wanted = math.ceil(total / target - 1e-9)
    each = total / capacity if capacity else math.inf
    reason = what.format(total / max(m.capacity, 1)) + f", target {target:g}"
    if (1.0 - config.down.tolerance) * target <= each <= (1.0 + config.up.tolerance) * target:
        return [Wish(replicas=capacity, reason=f"{reason}: within the band")]
    return [Wish(replicas=wanted, reason=reason)]


def _sum(m: PoolMetrics, each: float | None) -> float | None:
    """Returns the sum over the pool, from the values at its ready replicas; None without any."""
    return None if each is None or not m.ready else each * m.ready


def _forget(entries: deque[tuple[float, int]], before_s: float) -> None:
    while len(entries) > 1 and entries[0][0] <= before_s:
        entries.popleft()
