"""Pools, latency models and an independent replay for tests of planners."""

from __future__ import annotations

import math
import random
from array import array

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.scheduler.planning import PLANNERS, PlannerInputs
from millrace.core.scheduler.planning.plan import Plan
from millrace.profiles import load_profile

K = 1024

#: Tetris Table 1: seconds of a Llama-3-8B prefill on A100, by SP degree and by thousands of tokens.
TABLE_1 = {
    1: {4: 0.28, 8: 0.57, 16: 1.29, 32: 3.22, 64: 9.05, 128: 29.20},
    2: {4: 0.16, 8: 0.31, 16: 0.69, 32: 1.67, 64: 4.61, 128: 14.30, 256: 50.07},
    4: {4: 0.13, 8: 0.20, 16: 0.39, 32: 0.92, 64: 2.43, 128: 7.32, 256: 24.77},
    8: {4: 0.21, 8: 0.24, 16: 0.31, 32: 0.58, 64: 1.37, 128: 3.96, 256: 12.81},
    16: {4: 0.39, 8: 0.43, 16: 0.46, 32: 0.53, 64: 0.96, 128: 2.31, 256: 7.02},
}


def a100() -> SpLatency:
    """Returns the shipped profile that holds Table 1, with its degrees only."""
    shipped = load_profile("llama3-8b-a100-tp1").prefill
    return SpLatency(by_sp={sp: shipped.by_sp[sp] for sp in TABLE_1})


def inputs(nodes, *, latency: SpLatency | None = None, **config) -> PlannerInputs:
    """`nodes`: a tuple of node numbers, or how many instances to put on nodes of eight."""
    if isinstance(nodes, int):
        nodes = tuple(i // 8 for i in range(nodes))
    return PlannerInputs(latency=latency or a100(), nodes=nodes, config=SchedulerConfig(**config))


def planner(name: str, nodes, **config):
    return PLANNERS[name](inputs(nodes, planner=name, **config))


def after(plan: Plan, queue_s: array) -> array:
    """Returns the queues with the plan in them: its last group is busy until it ends."""
    left = array("d", queue_s)
    for member in plan.chunks[-1].members:
        left[member] = plan.ttft_s
    return left


def replay_s(plan: Plan, latency: SpLatency, queue_s) -> float:
    """Returns the TTFT of a plan, its queues drained chunk by chunk as in Eq. (2)."""
    queue, elapsed_s, history = list(queue_s), 0.0, 0
    for chunk in plan.chunks:
        passed_s = max(queue[i] for i in chunk.members)
        passed_s += latency.chunk_s(chunk.num_tokens, history, len(chunk.members))
        queue = [max(0.0, t - passed_s) for t in queue]
        elapsed_s += passed_s
        history += chunk.num_tokens
    return elapsed_s


def check(plan: Plan, tokens: int, given: PlannerInputs, queue_s) -> None:
    """Checks the rules of every plan: whole prompt, nested groups of usable degrees, its own
    TTFT."""
    size = len(given.nodes)
    assert sum(chunk.num_tokens for chunk in plan.chunks) == tokens
    before: tuple[int, ...] = ()
    for chunk in plan.chunks:
        assert chunk.num_tokens > 0
        assert len(chunk.members) in given.latency.degrees
        assert len(set(chunk.members)) == len(chunk.members)
        assert set(chunk.members) <= set(range(size))
        assert chunk.members[: len(before)] == before and len(chunk.members) > len(before)
        before = chunk.members
    expected_s = replay_s(plan, given.latency, queue_s)
    assert plan.ttft_s == pytest.approx(expected_s, rel=1e-9, abs=1e-12)


def random_latency(draw: random.Random, sp: int) -> Latency:
    """Draws Eq. (1) with coefficients of a likely size, some of them 0, and often measured
    points."""
    a = draw.choice([0.0, draw.uniform(0.0, 0.03) * sp])
    b = draw.uniform(1e-6, 1e-4) / sp ** draw.uniform(0.5, 1.0)
    d = draw.choice([0.0, draw.uniform(1e-10, 2e-9) / sp])
    points: list[tuple[int, float]] = []
    if draw.random() < 0.5:
        seconds = 0.0
        for tokens in sorted(draw.sample(range(1, 200_000), draw.randint(1, 7))):
            seconds = max(seconds, (a + tokens * (b + d * tokens)) * draw.uniform(0.9, 1.1))
            points.append((tokens, seconds))
    c = d * draw.choice([0.0, 1.0, 2.0, 2.9, draw.uniform(0.0, 4.0)])
    return Latency(a=a, b=b, c=c, d=d, points=tuple(points))


def random_nodes(draw: random.Random) -> tuple[int, ...]:
    """Draws nodes of eight, nodes of any size, or one node per instance."""
    size = draw.choice([1, 2, 3, 5, 8, 16, 16, 24, 32, draw.randint(1, 40)])
    kind = draw.random()
    if kind < 0.6:
        return tuple(i // 8 for i in range(size))
    if kind < 0.9:
        return tuple(draw.randint(0, size // 3) for _ in range(size))
    return tuple(draw.sample(range(100), size))


def random_queue_s(draw: random.Random, size: int) -> array:
    """Draws queues of a few seconds: spread, rounded so that many are equal, idle, or without
    room."""
    one = draw.choice(
        [
            lambda: 0.0,
            lambda: draw.uniform(0.0, 1.0),
            lambda: draw.expovariate(1 / 3),
            lambda: round(draw.uniform(0.0, 2.0), 1),
            lambda: draw.choice([0.0, 0.31, 1.0]),
            lambda: draw.choice([0.0, draw.uniform(0.0, 5.0), 1e9]),
            lambda: draw.choice([draw.uniform(0.0, 5.0), math.inf]),
        ]
    )
    return array("d", [one() for _ in range(size)])


def random_case(draw: random.Random) -> tuple[PlannerInputs, int, array, int, int]:
    """Draws (planner inputs, prompt tokens, queues, least SP degree, shortest chunk)."""
    nodes = random_nodes(draw)
    degrees = draw.choice([(1, 2, 4, 8, 16, 32), (1, 2, 3, 5, 7, 12), (1, 8), (1, 2, 4, 6, 8)])
    real = a100() if draw.random() < 0.3 else None
    latency = real or SpLatency(by_sp={sp: random_latency(draw, sp) for sp in degrees})
    rate = draw.choice([0.0, 0.05, 0.1, 0.3, 0.7, 1.0])
    return (
        inputs(nodes, latency=latency, improvement_rate=rate),
        draw.choice([1, draw.randint(1, 2000), draw.randint(4000, 190_000)]),
        random_queue_s(draw, len(nodes)),
        draw.choice([1, 1, 1, 2, 8, draw.randint(1, 64)]),
        draw.choice([1, 1, 64, 512, 4096]),
    )
