"""Why a request waits, told from the machine's own state."""

from __future__ import annotations

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.priority import POLICIES
from millrace.core.scheduler.explanation.explain import MOST_BEFORE, Explanation
from millrace.core.scheduler.outcomes.ended_requests import MOST_ENDED
from millrace.core.waits import COMPUTING, DECODE_ROOM, PREFILL, SUSPENDED, TURN
from support.core_events import Bench, groups_of, instance


def bench(*fleet: str, pages: int = 1000, **more) -> Bench:
    config = SchedulerConfig(**{"preemption": "operator", "batch_tokens": 0, **more})
    latency = groups_of(1, 2)
    cards = [instance(name, pages=pages, latency=latency, node="n") for name in fleet]
    return Bench(*cards, config=config)


def explained(one: Bench, name: str) -> Explanation:
    found = one.machine.explain(name, one.now_s)
    assert found is not None
    return found


def waited(found: Explanation) -> dict[str, float]:
    sums: dict[str, float] = {}
    for row in found.waited:
        sums[row.reason] = sums.get(row.reason, 0.0) + row.seconds
    return sums


def test_a_request_nobody_knows() -> None:
    assert bench("p0", "d0").machine.explain("r", 0.0) is None


@pytest.mark.parametrize(("errs", "other"), [("p0", "p1"), ("d0", "d1")])
def test_one_that_waits_for_a_breaker_names_the_instance(errs: str, other: str) -> None:
    one = bench("p0", "d0", other, breaker_errors=1)
    one.submit("a", 100, 28)
    one.failed(errs, "a", fault="compute")
    one.cordon(other)
    one.cancel("a")
    for name in ("p0", "d0", other):
        one.released(name, "a")
    one.submit("b", 100, 28)
    assert explained(one, "b").waits_for == f"{errs} to be tried again, after errors or slow chunks"


def test_one_without_room_at_decode_names_the_pages() -> None:
    one = bench("p0", "d0", pages=10)
    one.submit("a", 100, 28)
    one.submit("b", 100, 28, ttft_s=9.0)
    one.now_s = 2.0
    found = explained(one, "b")
    assert found.waits_for == ("room at a decode instance: it needs 8 pages, and d0 has most, 2")
    assert (found.part, found.key) == ("in time", "in time: deadline in 7 s")
    assert waited(found) == {DECODE_ROOM: 2.0}
    assert found.deadline_in_s == 7.0 and found.left_s == pytest.approx(0.1)


def test_what_goes_before_is_counted_by_part() -> None:
    one = bench("p0", "d0")
    for number in range(4):
        one.submit(f"in time {number}", 100, ttft_s=5.0)
    one.submit("late", 1000, ttft_s=0.5)
    found = explained(one, "late")
    assert found.part == "late" and found.stretch is not None
    assert [(row.part, row.requests) for row in found.ahead] == [("in time", 4)]
    assert found.ahead[0].seconds == pytest.approx(0.4)
    assert found.waits_for == "a task slot: all 1 prefill instances have 2 tasks before it"
    first = explained(one, "in time 0")
    assert first.ahead == () and first.attainment is not None and first.value is not None


#: What each policy says of the last of four requests that arrived 0.25 s ago.
KEYS = {
    "fcfs": "arrived 0.25 s ago",
    "edf": "deadline in 0.25 s",
    "d_edf": "deadline in 0.25 s",
    "s_edf": "slack -0.75 s",
    "lrs": "slack -0.75 s",
    "lars": "slack -0.75 s, -0.75 of its length",
    "lars_deadline": "slack -0.75 s",
}


def test_every_policy_tells_its_key() -> None:
    assert set(POLICIES) - {"millrace"} == set(KEYS), "give a new policy an entry in KEYS"


@pytest.mark.parametrize("policy", sorted(KEYS))
def test_other_policies_tell_their_key(policy: str) -> None:
    one = bench("p0", "d0", policy=policy)
    for number in range(4):
        one.submit(f"r{number}", 1000, ttft_s=0.5)
    one.now_s = 0.25
    found = explained(one, "r3")
    assert found.policy == policy and found.part == ""
    assert found.key == KEYS[policy]
    assert [row.requests for row in found.ahead] == [3]


def test_a_suspended_one_names_those_that_run() -> None:
    one = bench("p0", "d0", policy="edf")
    one.submit("long", 1000, ttft_s=9.0)
    one.chunk_started("p0", "long")
    one.now_s = 0.5
    one.submit("short", 100, ttft_s=1.0)
    one.suspended("p0", "long", 0.5)
    one.now_s = 0.75
    found = explained(one, "long")
    assert found.waits_for == "p0, where short run first"
    assert found.suspended_by == ("short",)
    assert waited(found) == {COMPUTING: 0.5, SUSPENDED: 0.25}
    assert [row.requests for row in found.ahead] == [1]
    one.chunk_started("p0", "short")
    assert explained(one, "short").waits_for == "nothing: it computes at p0"


def test_one_that_ended_keeps_its_times() -> None:
    one = bench("p0", "d0")
    one.submit("r", 100, ttft_s=1.0)
    one.now_s = 0.25
    one.chunk_started("p0", "r")
    one.now_s = 0.5
    one.computed("p0", "r")
    assert explained(one, "r").waits_for == "its KV to land at d0"
    one.now_s = 3.0
    one.decoding("d0", "r", since_token_s=2.5)
    assert explained(one, "r").waits_for == ""
    one.finished("d0", "r")
    found = explained(one, "r")
    assert (found.state, found.first_token_s, found.in_time) == ("finished", 0.5, True)
    assert waited(found) == {TURN: 0.25, COMPUTING: 0.25}
    assert sum(row.seconds for row in found.waited) == found.first_token_s


def saved(found: Explanation) -> dict[str, float]:
    return {one.what: round(one.saves_s, 6) for one in found.helps}


def test_those_before_it_are_named_with_their_keys() -> None:
    one = bench("p0", "d0", policy="edf", tasks_ahead=1)
    for number in range(MOST_BEFORE + 2):
        one.submit(f"r{number}", 1000, ttft_s=5.0 + number)
    found = explained(one, f"r{MOST_BEFORE + 1}")
    assert [row.request_id for row in found.before] == [f"r{n}" for n in range(MOST_BEFORE)]
    assert found.before[0].key == "deadline in 5 s" and found.before[0].seconds == 1.0
    assert [row.requests for row in found.ahead] == [MOST_BEFORE + 1]  # all are counted
    assert explained(one, "r0").before == ()


def test_what_would_have_helped_is_what_it_waited_for_and_computed() -> None:
    one = bench("p0", "d0")  # a token takes 1 ms, on a group of two half of that
    one.submit("first", 1000, ttft_s=9.0)
    one.submit("r", 400, ttft_s=9.0)
    one.now_s = 1.5
    one.chunk_started("p0", "r")
    one.now_s = 2.0
    one.computed("p0", "r")
    idle = "an idle prefill instance: more instances, or to go before others by the policy"
    cache = "a prefix cache that holds half of its prompt, 200 tokens"
    assert saved(explained(one, "r")) == {idle: 1.5, cache: pytest.approx(0.2, rel=0.3)}
    one.decoding("d0", "r")
    one.finished("d0", "r")
    assert saved(explained(one, "r")).keys() == {idle, cache}  # after its end, too
    assert [row.what for row in explained(one, "r").helps] == [idle, cache]


def test_a_larger_group_is_named_where_there_is_one() -> None:
    one = bench("p0", "p1", "d0", planner="fixed_sp", fixed_sp=1)
    one.submit("r", 1000, ttft_s=9.0)
    [member] = one.machine.requests["r"].chunks[0].instance_ids
    one.chunk_started(member, "r")
    one.now_s = 1.0
    one.computed(member, "r")
    wanted = {"a prefix cache that holds half of its prompt, 500 tokens"}
    assert saved(explained(one, "r")).keys() == wanted  # this planner makes no groups
    one.machine.cluster.pools["h"].configure(SchedulerConfig(planner="cdsp"))
    found = saved(explained(one, "r"))
    assert found["a group of 2 prefill instances instead of 1"] == pytest.approx(0.5, rel=0.3)


def test_only_the_last_that_ended_are_kept() -> None:
    one = bench("p0", "d0")
    for number in range(MOST_ENDED + 2):
        name = f"r{number}"
        one.submit(name, 10, 2)
        one.cancel(name)
        one.released("p0", name)
        one.released("d0", name)
    assert one.machine.explain("r1", 0.0) is None
    assert explained(one, "r2").state == "cancelled"


def test_the_part_at_the_time_counts() -> None:
    one = bench("p0", "d0")
    for number in range(3):
        one.submit(f"r{number}", 1000, ttft_s=3.5)
    one.submit("waits", 1000, ttft_s=4.5)
    one.now_s = 4.0
    one.tick(1.0)
    found = explained(one, "waits")
    parts = {row.part for row in found.waited if row.reason == PREFILL}
    assert "in time" in parts and found.part in {"late", "due"}


def place(one: Bench, name: str) -> int | None:
    return one.machine.queue_place(one.machine.requests[name])


def test_places_in_the_queue_count_from_one() -> None:
    one = bench("p0", "d0")
    for number in range(4):
        one.submit(f"r{number}", 100, ttft_s=5.0)
    assert [place(one, f"r{number}") for number in range(4)] == [1, 2, 3, 4]
    one.submit("urgent", 100, ttft_s=1.0)
    assert place(one, "r3") == 5


def test_requests_without_a_decode_instance_have_places_among_themselves() -> None:
    one = bench("p0", "d0", pages=10)
    for name in ("a", "b", "c"):
        one.submit(name, 100, 28, ttft_s=9.0)
    assert [place(one, name) for name in ("b", "c")] == [1, 2]
