"""The load of each pool as the scheduler reports it: the signals that autoscaling reads.

Not from a paper; `autoscale` says which signals it reads and why. None stands for a signal that was
not measured. The component that sets a pool's size adds the numbers that the scheduler does not
know: starting instances, draining instances, the quota.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.autoscale.rules import Context, PoolMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """One pool, summed over its instances; the fields are those of `PoolMetrics`."""

    role: str  # prefill | decode | mixed | kvp
    ready: int = 0  # take new work
    draining: int = 0
    active_requests: int = 0
    backlog_s: float | None = None
    arriving: float | None = None
    ttft_slo_ratio: float | None = None
    kv_utilisation: float | None = None
    tbt_slo_ratio: float | None = None
    contexts: tuple[Context, ...] = ()

    def metrics(
        self, *, sampled_s: float, parked_requests: int, size: int, quota: int | None = None
    ) -> PoolMetrics:
        """Returns a sample for `Autoscaler.step`, taken at `sampled_s` by the clock of its `now_s`.

        `size`: instances that were asked for and not told to leave. Instances among them that are
        not ready are starting. Ready instances beyond `size` (not cordoned yet, or a rollout's
        surge) are no capacity.
        """
        ready = min(self.ready, size)
        return PoolMetrics(
            sampled_s=sampled_s,
            ready=ready,
            starting=size - ready,
            draining=self.draining,
            active_requests=self.active_requests,
            parked_requests=parked_requests,
            backlog_s=self.backlog_s,
            arriving=self.arriving,
            ttft_slo_ratio=self.ttft_slo_ratio,
            kv_utilisation=self.kv_utilisation,
            tbt_slo_ratio=self.tbt_slo_ratio,
            contexts=self.contexts,
            quota=quota,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """All pools of one scheduler, by role."""

    pools: dict[str, PoolLoad]
    parked_requests: int = 0  # held back at the proxies until a pool wakes

    def of(self, role: str) -> PoolLoad:
        """Returns a pool's load; a pool without an instance has a load of nothing."""
        return self.pools.get(role, PoolLoad(role=role))
