"""Requests that no instance may or can hold alone: their KV is spread over several (KVP)."""

from __future__ import annotations

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.effects import AdmitDecode, CancelOn, Fail, Place, Refuse, RunPrefill
from millrace.core.events import RequestFailed
from millrace.core.request import RequestState
from support.core_events import Bench, instance, of

LIMIT = SchedulerConfig(max_kv_tokens_per_worker=320)


def fleet(*names: str, config: SchedulerConfig = LIMIT, pages: int = 100, **kwargs) -> Bench:
    """One prefill instance with room for anything, and these, of `pages` pages of 16 tokens."""
    large = instance("p0", pages=10_000, context=100_000, **kwargs)
    others = [instance(name, pages=pages, context=100_000, **kwargs) for name in names]
    return Bench(large, *others, config=config)


def shards_of(found) -> list[tuple[str, int, int]]:
    (admitted,) = of(AdmitDecode, found)
    return [(s.worker_id, s.start_token, s.end_token) for s in admitted.shards]


def holdings(bench: Bench) -> dict[str, dict[str, int]]:
    instances = bench.machine.cluster.instances.values()
    return {
        one.id: {r: h.pages for r, h in one.holdings.items()}
        for one in instances
        if one.card.role != "prefill"
    }


def places(found) -> list[tuple[str, str]]:
    return [(e.request_id, e.decode_id) for e in of(Place, found)]


def test_what_is_longer_than_an_instance_may_hold_is_spread_over_kvp_workers():
    bench = fleet("d0", "d1", "k0", "k1")
    found = bench.submit("a", 700, 20)
    assert shards_of(found) == [("d0", 0, 320), ("k0", 320, 640), ("k1", 640, 720)]
    (run,) = of(RunPrefill, found)
    assert run.shards == of(AdmitDecode, found)[0].shards and run.decode_id == "d0"
    assert holdings(bench) == {"d0": {"a": 20}, "d1": {}, "k0": {"a": 20}, "k1": {"a": 5}}
    assert shards_of(bench.submit("b", 300, 20)) == []  # just what one may hold


def test_decode_instances_hold_what_is_too_much_for_kvp_workers():
    bench = fleet("d0", "d1", "k0")
    assert shards_of(bench.submit("a", 700, 20)) == [
        ("d0", 0, 320),
        ("d1", 320, 640),
        ("k0", 640, 720),
    ]
    assert bench.machine.cluster.instances["d1"].open_pages == 80


def test_without_a_limit_only_what_fits_no_instance_is_spread():
    bench = fleet("d0", "d1", "k0", config=SchedulerConfig())
    assert shards_of(bench.submit("a", 1590, 10)) == []
    assert shards_of(bench.submit("b", 1600, 10)) == [("d1", 0, 1600), ("k0", 1600, 1610)]
    # d1 is full, and d0 would be large enough: it is waited for.
    assert not places(bench.submit("c", 1590, 10))


def test_a_request_of_several_choices_is_never_spread():
    bench = fleet("d0", "k0")
    assert shards_of(bench.submit("a", 700, 20, choices=2)) == []
    (refused,) = of(Refuse, bench.submit("b", 1600, 20, choices=2))
    assert refused.code == "too_large"
    assert "640 of one request, if it has one choice" in refused.message


def test_a_refusal_says_what_the_fleet_could_hold():
    bench = fleet("d0", "d1", "k0")
    (refused,) = of(Refuse, bench.submit("a", 960, 1))
    assert refused.code == "too_large"
    assert "room for 1600 tokens and a context of 100000" in refused.message
    assert refused.message.endswith("all instances together hold 960 of one request")
    assert shards_of(bench.submit("b", 959, 1))


def test_no_more_instances_than_the_degree_allows():
    config = SchedulerConfig(max_kv_tokens_per_worker=320, max_kvp_degree=2)
    bench = fleet("d0", "k0", "k1", config=config)
    assert len(shards_of(bench.submit("a", 600, 40))) == 2
    (refused,) = of(Refuse, bench.submit("b", 600, 41))
    assert "hold 640 of one request" in refused.message


def test_a_limit_below_a_page_is_a_page():
    config = SchedulerConfig(max_kv_tokens_per_worker=1)
    bench = fleet("d0", "k0", config=config)
    assert shards_of(bench.submit("a", 20, 4)) == [("d0", 0, 16), ("k0", 16, 24)]


def test_the_home_is_the_freest_of_those_with_the_shortest_spread():
    bench = fleet("d0", "d1", "k0")
    bench.submit("short", 100)
    assert shards_of(bench.submit("a", 400, 20))[0][0] == "d1"
    # d1 has more free pages per sequence, and too few for a whole shard.
    bench = fleet("d0", "k0")
    bench.step(instance("d1", pages=10, context=100_000))
    for name in "ab":
        bench.submit(name, 160)
        bench.computed("p0", name)
        bench.decoding("d0", name)
    assert shards_of(bench.submit("c", 400, 20))[0] == ("d0", 0, 320)


def test_the_context_counts_wherever_the_kv_is():
    bench = Bench(
        instance("p0", pages=1000, context=9000),
        instance("d0", context=500),
        instance("k0", context=9000),
        config=LIMIT,
    )
    assert of(Refuse, bench.submit("a", 480, 21)) and shards_of(bench.submit("b", 480, 20))


# ---- lives


def test_a_spread_request_lives_to_its_end_and_its_holders_let_go():
    bench = fleet("d0", "k0")
    bench.submit("a", 400, 20)
    bench.serve("a")
    assert holdings(bench) == {"d0": {}, "k0": {"a": 7}}
    bench.released("k0", "a", attempt=1)
    assert holdings(bench) == {"d0": {}, "k0": {}}
    assert bench.machine.release_timeouts == 0 and bench.machine.ignored == 0


def test_a_holder_may_let_go_before_the_home_says_that_the_answer_is_complete():
    bench = fleet("d0", "k0")
    bench.submit("a", 400, 20)
    bench.computed("p0", "a")
    bench.decoding("d0", "a")
    assert bench.released("k0", "a", attempt=1) == []
    found = bench.finished("d0", "a")
    assert not of(Fail, found) and not bench.machine.requests


def test_a_cancel_is_told_to_all_holders():
    bench = fleet("d0", "k0", "k1")
    bench.submit("a", 700, 20)
    told = of(CancelOn, bench.cancel("a"))
    assert [e.instance_id for e in told] == ["p0", "d0", "k0", "k1"]
    bench.tick(bench.machine.config.release_timeout_s + 1)
    assert holdings(bench) == {"d0": {}, "k0": {}, "k1": {}}
    assert bench.machine.release_timeouts == 4


@pytest.mark.parametrize("holder", ["k0", "d1"])
def test_a_holder_that_dies_before_token_one_costs_an_attempt(holder):
    bench = fleet("d0", holder, "k1")
    bench.submit("a", 700, 20)
    bench.landed("a", 500)
    bench.step(instance("k2", context=100_000))
    found = bench.died(holder)
    assert sorted(e.instance_id for e in of(CancelOn, found)) == ["d0", "k1", "p0"]
    assert not of(Fail, found)
    request = bench.machine.requests["a"]
    assert request.state is RequestState.QUEUED and not request.shards
    assert not request.kept_tokens  # it begins anew
    for one in ("p0", "k1", "d0"):
        found = bench.released(one, "a", attempt=1)
    assert shards_of(found) == [("d0", 0, 320), ("k1", 320, 640), ("k2", 640, 720)]
    assert of(AdmitDecode, found)[0].attempt == 2


@pytest.mark.parametrize("decoding", [False, True])
def test_a_holder_that_dies_later_ends_an_answer_that_may_go_on_elsewhere(decoding):
    bench = fleet("d0", "k0")
    bench.submit("a", 400, 20)
    bench.computed("p0", "a")
    if decoding:
        bench.decoding("d0", "a")
    (failed,) = of(Fail, bench.died("k0"))
    assert failed.resumable and failed.message == "kvp k0 died after the first token"


def test_the_death_of_the_home_is_told_to_its_holders():
    bench = fleet("d0", "d1", "k0")
    bench.submit("a", 400, 20)
    assert [e.instance_id for e in of(CancelOn, bench.died("d0"))] == ["p0", "k0"]


def test_a_holder_that_gives_up_early_is_a_failed_attempt():
    bench = fleet("d0", "k0", "k1")
    bench.submit("a", 400, 20)
    found = bench.released("k0", "a", attempt=1)
    assert [e.instance_id for e in of(CancelOn, found)] == ["p0", "d0"]
    assert bench.machine.requests["a"].state is RequestState.QUEUED


def test_what_a_holder_says_of_an_earlier_attempt_changes_nothing():
    bench = fleet("d0", "k0")
    bench.submit("a", 400, 20)
    bench.failed("d0", "a", attempt=1)
    for one in ("p0", "d0", "k0"):
        bench.released(one, "a", attempt=1)
    assert bench.machine.requests["a"].attempt == 2
    before = bench.machine.ignored
    bench.released("k0", "a", attempt=1)
    assert bench.machine.ignored == before + 1 and holdings(bench)["k0"] == {"a": 7}


def test_what_decode_would_keep_of_a_spread_request_is_dropped():
    bench = fleet("d0", "k0")
    bench.submit("a", 400, 20)
    found = bench.failed("d0", "a", attempt=1, kept_tokens=300)
    assert [e.instance_id for e in of(CancelOn, found)] == ["p0", "d0", "k0"]
    assert bench.machine.requests["a"].decode_id is None


def test_only_the_home_speaks_for_the_request():
    bench = fleet("d0", "d1")
    assert shards_of(bench.submit("a", 400, 20))[0][0] == "d0"
    bench.computed("p0", "a")
    before = bench.machine.ignored
    bench.decoding("d1", "a")
    bench.finished("d1", "a")
    assert bench.machine.ignored == before + 2
    assert bench.machine.requests["a"].state is RequestState.TRANSFERRING
    # A failure is different: the request can't go on without what the holder has.
    (failed,) = of(Fail, bench.failed("d1", "a"))
    assert failed.resumable


def test_a_cordoned_holder_takes_no_shards_and_what_waits_there_goes_elsewhere():
    config = SchedulerConfig(max_kv_tokens_per_worker=320, tasks_ahead=1)
    bench = fleet("d0", "k0", config=config)
    bench.submit("first", 100)
    bench.submit("a", 400, 20)  # its turn at prefill is yet to come
    assert bench.machine.requests["a"].state is RequestState.QUEUED
    assert not bench.cordon("k0")  # nothing else could hold it
    bench.step(instance("k1", context=100_000))
    assert not bench.cordon("k0")  # the home has the attempt that is to move
    bench.step(instance("d1", context=100_000))
    assert shards_of(bench.cordon("k0")) == [("d1", 0, 320), ("k1", 320, 420)]
    bench.cordon("k0", cordoned=False)
    assert set(bench.machine.cluster.pools["h"].kvp) == {"k0", "k1"}


# ---- waiting


def test_short_requests_pass_one_that_waits_for_several_instances():
    bench = fleet("d0", "d1", "k0", pages=20)
    bench.submit("a", 500, 20)  # home d0, holder k0
    assert holdings(bench) == {"d0": {"a": 20}, "d1": {}, "k0": {"a": 13}}
    assert not places(bench.submit("b", 500, 20))  # d1, and seven pages of k0, are not enough
    assert places(bench.submit("c", 100, 4)) == [("c", "d1")]


def test_one_that_waits_keeps_its_holders_until_they_are_free():
    config = SchedulerConfig(max_kv_tokens_per_worker=320, policy="fcfs")
    bench = fleet("d0", "k0", "k1", pages=22, config=config)
    bench.submit("a", 500, 140)
    assert not places(bench.submit("b", 700, 20))  # waits for k0
    assert not places(bench.submit("c", 16, 4))  # comes after b, which keeps d0
    bench.serve("a")
    assert not places(bench.all[1:])
    assert places(bench.released("k0", "a", attempt=1)) == [("b", "d0"), ("c", "d0")]


def test_two_long_requests_never_wait_for_each_other():
    """Each would hold what the other needs, if they grew as they went."""
    bench = fleet("d0", "d1", pages=20)
    assert places(bench.submit("a", 500, 140)) and not places(bench.submit("b", 500, 140))
    assert holdings(bench) == {"d0": {"a": 20}, "d1": {"a": 20}}
    bench.serve("a")
    assert places(bench.released("d1", "a", attempt=1)) == [("b", "d0")]


def test_a_worker_that_joins_makes_room():
    bench = fleet("d0", "k0", pages=25)
    bench.submit("a", 500, 100)
    assert not places(bench.submit("b", 300, 50))
    assert places(bench.step(instance("d1", context=100_000))) == [("b", "d1")]


def test_a_non_retryable_failure_of_a_holder_ends_the_request():
    bench = fleet("d0", "k0")
    bench.submit("a", 400, 20)
    event = RequestFailed(
        instance_id="k0", generation=1, request_id="a", message="broken", retryable=False
    )
    (failed,) = of(Fail, bench.step(event))
    assert failed.message == "kvp k0: broken" and not failed.resumable


# ---- mixed instances


def test_mixed_instances_are_homes_and_holders():
    config = SchedulerConfig(max_kv_tokens_per_worker=320)
    bench = Bench(instance("m0"), instance("m1"), config=config)
    found = bench.submit("a", 400, 20)
    assert shards_of(found) == [("m0", 0, 320), ("m1", 320, 420)]
    (run,) = of(RunPrefill, found)
    assert run.instance_id == "m0" and len(run.shards) == 2
    bench.computed("m0", "a")
    bench.decoding("m0", "a")
    bench.finished("m0", "a")
    bench.released("m1", "a", attempt=1)
    assert holdings(bench) == {"m0": {}, "m1": {}}
