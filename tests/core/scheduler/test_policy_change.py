"""Changes the policy while requests wait and run: everything is ranked again at once."""

from __future__ import annotations

import itertools
import json
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.priority import POLICIES
from millrace.core.request import Slo
from millrace.core.scheduler import recording
from millrace.core.scheduler.events import PolicyChanged, Submitted, WeightsChanged
from millrace.core.scheduler.machine import Machine
from millrace.core.weights import Weights
from support.core_events import Bench, groups_of, instance, request
from support.priority import keys_of

#: Prompt tokens (1 ms each) and TTFT objective: every policy orders these in its own way.
MIX = [(4000, 30.0), (100, 20.0), (2000, 2.5), (300, 0.35), (1000, None), (700, 9.0), (50, 1.0)]


def bench(policy: str, preemption: str = "operator", *, decode_pages: int = 10_000) -> Bench:
    config = SchedulerConfig(policy=policy, preemption=preemption, tasks_ahead=3)
    return Bench(
        instance("p0", pages=5000, context=100_000, latency=groups_of(1)),
        instance("d0", pages=decode_pages, context=100_000, batch=1000),
        config=config,
    )


def loaded(policy: str, preemption: str = "operator") -> Bench:
    """A bench with requests in the run queue, one of them running, and in the waiting queue."""
    one = bench(policy, preemption)
    for number, (prompt, ttft_s) in enumerate(MIX):
        one.now_s += 0.01
        one.submit(f"r{number}", prompt, ttft_s=ttft_s)
        if number == 0:
            one.chunk_started("p0", "r0")
    return one


@pytest.mark.parametrize("before, after", list(itertools.permutations(POLICIES, 2)))
def test_all_that_waits_and_runs_is_ranked_by_the_new_policy(before: str, after: str) -> None:
    one = loaded(before)
    (pool,) = one.machine.cluster.pools.values()
    one.now_s += 0.5
    # Copies, as they are before the change: a ranking notes what it finds in its requests.
    requests = deepcopy([*pool.waiting, *pool.run_queue.heads()])
    names = [request.id for request in requests]
    assert set(names) == {f"r{number}" for number in range(len(MIX))}
    keys = dict(zip(names, keys_of(after, requests, one.now_s), strict=True))
    one.step(PolicyChanged(policy=after))
    assert one.machine.policy == after
    waiting = list(pool.waiting)
    assert waiting == sorted(waiting, key=lambda r: (keys[r.id], r.order))
    for task in pool.run_queue.ranked:
        assert task.rank == (keys[task.requests[0].id], task.requests[0].order, 0)


names = st.sampled_from(sorted(POLICIES))


@settings(max_examples=60)
@given(
    policy=names,
    preemption=st.sampled_from(["none", "operator"]),
    steps=st.lists(
        st.one_of(
            names,
            st.tuples(st.integers(1, 3000), st.sampled_from([None, 0.2, 1.0, 30.0])),
            st.floats(0.0, 3.0),
            st.just("work"),
        ),
        max_size=40,
    ),
)
def test_random_switches_lose_nothing_and_are_replayed(policy, preemption, steps) -> None:
    """Also through the written form: another machine takes the same decisions."""
    one = bench(policy, preemption)
    written = []
    step = one.machine.step

    def stepping(event, now_s):
        line = json.dumps([now_s, recording.plain_event(event)])
        found = step(event, now_s)
        written.append((line, recording.plain_effects(found)))
        return found

    one.machine.step = stepping
    submitted = 0
    for what in steps:
        if isinstance(what, tuple):
            one.submit(f"r{submitted}", what[0], ttft_s=what[1])
            submitted += 1
        elif isinstance(what, float):
            one.tick(what)
        elif what == "work":
            compute(one)
        else:
            one.step(PolicyChanged(policy=what))
    assert len(one.machine.requests) + ended(one) == submitted
    while one.machine.requests:
        compute(one)
    other = bench(policy, preemption).machine
    for line, effects in written:
        now_s, event = json.loads(line)
        assert recording.plain_effects(other.step(recording.event_of(event), now_s)) == effects


def compute(one: Bench) -> None:
    """The instance computes its commands, and decode ends the request."""
    for task in [t for t in one.machine.cluster.instances["p0"].queue if t.chosen]:
        one.serve(task.requests[0].id)


def ended(one: Bench) -> int:
    return sum(
        getattr(effect, "state", None) is not None and effect.state.is_final for effect in one.all
    )


def test_the_time_of_token_one_is_kept_whoever_tells_of_it_first() -> None:
    for tell in ("computed", "decoding"):
        one = bench("fcfs")
        one.submit("r")
        request = one.machine.requests["r"]
        one.chunk_started("p0", "r")
        one.now_s = 2.5
        one.computed("p0", "r") if tell == "computed" else one.decoding("d0", "r")
        one.now_s = 3.0
        one.decoding("d0", "r") if tell == "computed" else one.computed("p0", "r")
        one.finished("d0", "r")
        assert request.first_token_s == 2.5


def test_a_new_machine_follows_its_settings() -> None:
    assert Machine(SchedulerConfig(policy="lars")).policy == "lars"


def test_weights_change_one_by_one_and_outlast_a_change_of_policy() -> None:
    one = loaded("millrace")
    one.step(WeightsChanged(weights=Weights(classes={"a": 2.0}, tenants={"x": 3.0, "y": 1.0})))
    one.step(PolicyChanged(policy="edf"))
    one.step(WeightsChanged(weights=Weights(tenants={"y": 0.5})))
    one.step(PolicyChanged(policy="millrace"))
    assert one.machine.weights == Weights(classes={"a": 2.0}, tenants={"x": 3.0, "y": 0.5})
    one.machine.check_integrity()


def test_a_class_of_more_weight_keeps_its_request_where_only_one_can_be_in_time() -> None:
    for favoured, other in (("a", "b"), ("b", "a")):
        one = bench("millrace")
        one.step(WeightsChanged(weights=Weights(classes={favoured: 5.0})))
        for name in ("a", "b"):
            asked = request(name, 1000, arrival_s=one.now_s).request
            slo = Slo(ttft_s=1.2, class_name=name)
            one.step(Submitted(request=replace(asked, slo=slo)))
        (pool,) = one.machine.cluster.pools.values()
        assert [r.id for r in pool.run_queue.heads()] == [favoured, other]
