"""The mechanisms in force are listed as they are; a mechanism that is off has a reason."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.scheduler.explanation.mechanisms import mechanisms
from support.core_events import Bench, instance


def latency(*degrees: int, start_s: float = 0.05) -> SpLatency:
    by_sp = {sp: Latency(a=start_s, b=1e-3 / sp) for sp in (1, *degrees)}
    return SpLatency(by_sp=MappingProxyType(by_sp))


def said(*cards, **settings) -> dict[str, str]:
    bench = Bench(*cards, config=SchedulerConfig(**settings))
    return {
        one.name: f"{'on' if one.on else 'off'}: {one.detail}" for one in mechanisms(bench.machine)
    }


def pool(count: int, *degrees: int, **more):
    cards = [instance(f"p{i}", latency=latency(*degrees), **more) for i in range(count)]
    return [*cards, instance("d0")]


def test_by_default_all_is_on_where_times_of_groups_are_known():
    assert said(*pool(4, 2, 4)) == {
        "policy": "on: millrace",
        "preemption": "on: of a running prefill, at every operator",
        "adaptive chunks": "off: the pool has no mixed instance",
        "groups (CDSP)": "on: of 1, 2, 4 instances",
        "improvement rate by load": "on: by load, now 0.3",
        "batches of prompts": "on: of less than 512 tokens, which fill an instance",
    }


@pytest.mark.parametrize(
    "cards, settings, name, why",
    [
        (pool(2), {}, "groups (CDSP)", "no times of groups are known; `millrace profile --sp 2`"),
        (pool(1, 2), {}, "groups (CDSP)", "the pool has 1 prefill instance"),
        (pool(2, 4), {}, "groups (CDSP)", "times are known of groups of 4 and more"),
        (pool(2, 2), {"planner": "least_queue"}, "groups", "scheduler.planner is least_queue"),
        (
            [*pool(1, 2, page_tokens=32), *pool(2, 2)[1:]],
            {},
            "groups (CDSP)",
            "the pool's instances differ in their pages",
        ),
        ([instance("m0")], {}, "groups", "the pool has no prefill instance"),
        (
            [instance("m0"), instance("m1", adaptive_chunks=True)],
            {},
            "adaptive chunks",
            "mixed.chunking is static at m0",
        ),
        (pool(2), {"preemption": "none"}, "preemption", "scheduler.preemption is none"),
        (pool(2), {"batch_tokens": 0}, "batches of prompts", "scheduler.batch_tokens is 0"),
        ([instance("p0"), instance("d0")], {}, "batches of prompts", "a prompt of one token fills"),
        (
            pool(2, 2),
            {"improvement_rate": 0.2},
            "improvement rate by load",
            "fixed, now 0.2",
        ),
    ],
)
def test_what_is_off_says_why(cards, settings, name, why):
    assert said(*cards, **settings)[name].startswith(f"off: {why}")


def test_chunks_of_mixed_instances_adapt():
    found = said(instance("p0"), instance("m0", adaptive_chunks=True))
    assert found["adaptive chunks"] == "on: of prompts in batches with decodes"


def test_without_instances_only_the_scheduler_s_own_are_told():
    assert list(said()) == ["policy", "preemption"]
