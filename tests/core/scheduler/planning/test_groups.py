"""Groups through the machine: pages of shares, members without room, members that die."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.scheduler.planning.plan import Plan, PlannedChunk
from support.core_events import Bench, groups_of, instance
from support.prefill_fleet import Fleet


def bench(count: int, *, pages: int = 100, context: int = 100_000, sp=(1, 2, 4), **more) -> Bench:
    """Pages of 16 tokens; a prompt of 1000 tokens takes 1 s on one instance."""
    latency = groups_of(*sp)
    fleet = [
        instance(f"p{i}", pages=pages, latency=latency, node="n", context=context)
        for i in range(count)
    ]
    settings_ = SchedulerConfig(**{"planner": "single_chunk", "improvement_rate": 0.9, **more})
    return Bench(*fleet, instance("d0", pages=100_000, context=context), config=settings_)


def used(one: Bench) -> list[int]:
    instances = one.machine.cluster.instances
    return [i.used_pages for name, i in sorted(instances.items()) if name.startswith("p")]


class AnyGroup:
    """A planner that picks by the numbers a test drew, of degree `least_sp` or more."""

    def __init__(self, numbers: list[int], size: int) -> None:
        self.numbers, self.size = numbers, size

    def plan(self, request, queue_s, least_sp=1) -> Plan:
        free = [i for i in range(self.size) if queue_s[i] < 1e8]
        degrees = [sp for sp in (1, 2, 4) if sp >= least_sp] or [4]
        sp = degrees[self.numbers.pop() % len(degrees)]
        if len(free) < sp:
            free = list(range(self.size))
        start = self.numbers.pop() % len(free)
        order = tuple((free[start:] + free[:start])[:sp])
        return Plan((PlannedChunk(request.prompt_tokens, order),), 0.0)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.integers(0, 1 << 30).map(Random),
    st.sampled_from(["none", "operator"]),
    st.sampled_from(["fcfs", "edf", "lrs"]),
)
def test_random_gangs_all_end_and_pages_are_never_promised_twice(
    prompts, random, preemption, policy
) -> None:
    """No group waits for another in a circle, whichever members they have in common."""
    one = bench(5, pages=20, policy=policy, preemption=preemption, tasks_ahead=3)
    (pool,) = one.machine.cluster.pools.values()
    pool.plan = AnyGroup([random.randrange(1000) for _ in range(5000)], 5).plan
    fleet = Fleet(one, preemptive=preemption != "none")
    fleet.serve(
        [
            (random.random() / 2, f"r{i}", tokens, random.random() * 2 + 0.01)
            for i, tokens in enumerate(prompts)
        ]
    )
    assert len(fleet.computed_s) == len(prompts)
    assert used(one) == [0] * 5
