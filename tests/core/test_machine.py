"""One request's way through the machine, and every way it can go wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.core import events
from millrace.core.config import SchedulerConfig
from millrace.core.effects import AdmitDecode, CancelOn, Fail, Place, Record, Refuse, RunPrefill
from millrace.core.errors import IntegrityError
from millrace.core.request import RequestState
from support.core_events import Bench, instance, of


def in_order(**fields) -> SchedulerConfig:
    """First come, first served, and nobody yields."""
    return SchedulerConfig(policy="fcfs", preemption="none", **fields)


def states(found):
    return [effect.state.value for effect in of(Record, found)]


def cancelled_on(found):
    return [(effect.instance_id, effect.request_id) for effect in of(CancelOn, found)]


def test_a_request_is_placed_admitted_and_dispatched_at_once_when_there_is_room():
    bench = Bench(instance("p0"), instance("d0"))
    found = bench.submit("r", 100)
    assert [type(effect) for effect in found] == [Place, AdmitDecode, Record, RunPrefill, Record]
    place, admit, _, prefill, _ = found
    assert place.decode_id == admit.instance_id == prefill.decode_id == "d0"
    assert place.predicted_ttft_s == pytest.approx(0.1)
    assert [(c.start_token, c.num_tokens, c.instance_ids) for c in prefill.chunks] == [
        (0, 100, ("p0",))
    ]


def test_a_whole_life_records_each_state_and_leaves_nothing_behind():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("r")
    bench.serve("r")
    assert states(bench.all) == ["queued", "prefilling", "transferring", "decoding", "finished"]
    assert not bench.machine.requests
    assert all(not i.holdings for i in bench.machine.cluster.instances.values())


def test_decode_may_speak_before_prefill_does():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("r")
    bench.decoding("d0", "r")
    bench.computed("p0", "r")
    bench.released("p0", "r")
    bench.finished("d0", "r")
    assert states(bench.all) == ["queued", "prefilling", "decoding", "finished"]


def test_a_first_token_that_is_the_last_finishes_without_decoding():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("r", new=1)
    found = bench.finished("d0", "r", "length")
    assert states(found) == ["finished"] and not cancelled_on(found)
    bench.computed("p0", "r")
    bench.released("p0", "r")
    assert bench.machine.cluster.instances["p0"].free_pages == 100


# ---- queue and dispatch


def test_an_instance_holds_tasks_ahead_and_the_rest_waits_in_order():
    bench = Bench(instance("p0"), instance("d0"), config=in_order(tasks_ahead=2))
    for name in ("a", "b", "c", "d"):
        bench.submit(name)
    assert [e.request_id for e in of(RunPrefill, bench.all)] == ["a", "b"]
    assert bench.machine.queued == 2
    assert bench.machine.queued_s == pytest.approx(0.2)
    assert [e.request_id for e in of(RunPrefill, bench.computed("p0", "a"))] == ["c"]


def test_the_slot_is_free_with_the_last_chunk_and_the_pages_with_the_release():
    bench = Bench(instance("p0", pages=8), instance("d0"))
    bench.submit("a", 100)
    found = bench.submit("b", 100)
    assert of(Place, found) and not of(RunPrefill, found)  # 7 of 8 pages are taken
    assert not of(RunPrefill, bench.computed("p0", "a"))
    assert of(RunPrefill, bench.released("p0", "a"))


def test_work_goes_to_the_instance_with_the_least_left_of_it():
    bench = Bench(instance("p0"), instance("p1"), instance("d0", pages=1000))
    bench.submit("a", 1000)  # p0: 1 s
    bench.submit("b", 900)  # p1: 0.9 s
    bench.chunk_started("p0", "a")
    bench.now_s = 0.5
    found = bench.submit("c", 100)  # p0 has 0.5 s left, p1 has not begun
    assert [e.instance_id for e in of(RunPrefill, found)] == ["p0"]
    assert of(Place, found)[0].predicted_ttft_s == pytest.approx(0.6)


def test_predicted_ttft_counts_the_line_over_all_instances():
    config = SchedulerConfig(tasks_ahead=1)
    bench = Bench(instance("p0"), instance("p1"), instance("d0", pages=1000), config=config)
    for name in ("a", "b", "c"):
        bench.submit(name, 1000)
    found = bench.submit("d", 500)  # two of 1 s run, one of 1 s waits, two instances
    assert of(Place, found)[0].predicted_ttft_s == pytest.approx(1.5 + 0.5)


def test_a_large_request_at_the_head_is_not_starved_by_small_ones():
    bench = Bench(instance("p0"), instance("d0", pages=20), config=SchedulerConfig(tasks_ahead=9))
    bench.submit("a", 100, 28)  # 8 pages
    bench.submit("b", 100, 28)
    assert not of(Place, bench.submit("big", 200, 56))  # 16 pages, 4 are free
    assert not of(Place, bench.submit("small", 10, 6))  # 1 page, which the head keeps
    bench.serve("a")
    assert "small" not in [e.request_id for e in of(Place, bench.all)]
    bench.serve("b")
    assert [e.request_id for e in of(Place, bench.all)] == ["a", "b", "big", "small"]


def test_a_large_request_reserves_one_instance_and_others_go_on():
    bench = Bench(
        instance("p0", pages=1000),
        instance("d0", pages=20),
        instance("d1", pages=20),
        config=SchedulerConfig(tasks_ahead=64),
    )
    for name in ("a", "b"):
        bench.submit(name, 100, 28)
    bench.submit("big", 300, 20)  # 20 pages: a whole instance
    placed = [of(Place, bench.submit(name, 10, 6)) for name in ("s0", "s1")]
    at = {place.decode_id for places in placed for place in places}
    assert len(placed) == 2 and len(at) == 1  # both on the instance that "big" does not wait for
    keeper = ({"d0", "d1"} - at).pop()
    holder = {e.request_id: e.decode_id for e in of(Place, bench.all)}
    first = next(name for name in ("a", "b") if holder[name] == keeper)
    bench.serve(first, decode=keeper)
    assert of(Place, bench.all)[-1].request_id == "big"
    assert of(Place, bench.all)[-1].decode_id == keeper


def test_at_prefill_nobody_passes_the_head_of_the_line():
    bench = Bench(instance("p0", pages=10), instance("d0"), config=in_order(tasks_ahead=3))
    bench.submit("a", 100)  # 7 pages
    bench.submit("big", 100)
    assert not of(RunPrefill, bench.submit("small", 10))
    bench.computed("p0", "a")
    found = bench.released("p0", "a")
    assert [e.request_id for e in of(RunPrefill, found)] == ["big", "small"]


@pytest.mark.parametrize("policy", ["fcfs", "edf", "s_edf"])
def test_with_preemption_too_nobody_takes_the_pages_that_the_head_waits_for(policy):
    """Whoever passes it yields compute when it can start, but pages only at its own end."""
    config = SchedulerConfig(policy=policy, preemption="operator")
    bench = Bench(instance("p0", pages=100), instance("d0", pages=9999, batch=99), config=config)
    for number in range(2):
        bench.submit(f"s{number}", 160, ttft_s=50.0)
    bench.submit("big", 1500, ttft_s=60.0)  # 94 pages
    for number in range(2, 20):
        bench.submit(f"s{number}", 160, ttft_s=200.0)
    assert [e.request_id for e in of(RunPrefill, bench.all)] == ["s0", "s1"]
    for name in ("s0", "s1"):
        bench.chunk_started("p0", name)
        bench.computed("p0", name)
        bench.released("p0", name)
    assert of(RunPrefill, bench.all)[2].request_id == "big"


def test_a_page_hungry_head_keeps_one_instance_and_others_go_on_elsewhere():
    config = SchedulerConfig(policy="edf", preemption="operator", tasks_ahead=3)
    prefill = [instance(name, pages=100) for name in ("p0", "p1")]
    bench = Bench(*prefill, instance("d0", pages=9999, batch=99), config=config)
    for number in range(4):
        bench.submit(f"s{number}", 160, ttft_s=50.0)
    bench.submit("big", 1500, ttft_s=60.0)
    bench.submit("late", 16, ttft_s=200.0)
    sent = {e.request_id: e.instance_id for e in of(RunPrefill, bench.all)}
    assert "big" not in sent
    assert "late" in sent
    kept = ({"p0", "p1"} - {sent["late"]}).pop()
    for name in [name for name, where in sent.items() if where == kept]:
        bench.chunk_started(kept, name)
        bench.computed(kept, name)
        found = bench.released(kept, name)
    assert [(e.request_id, e.instance_id) for e in of(RunPrefill, found)] == [("big", kept)]


def test_a_request_that_its_own_leftovers_keep_back_blocks_nobody():
    bench = Bench(instance("p0"), instance("d0"), config=SchedulerConfig(tasks_ahead=9))
    late = ["a", "b", "c", "d", "e", "f"]
    for name in late:
        bench.submit(name, 10, 6)
        bench.failed("p0", name)  # neither p0 nor d0 has let go yet
    assert [e.request_id for e in of(RunPrefill, bench.submit("z", 10, 6))] == ["z"]
    assert not of(RunPrefill, bench.released("d0", "a"))  # placed, but p0 still holds it
    assert [e.request_id for e in of(RunPrefill, bench.submit("y", 10, 6))] == ["y"]
    assert [e.request_id for e in of(RunPrefill, bench.released("p0", "a"))] == ["a"]


# ---- refusals


def test_without_a_role_a_request_is_refused_and_told_when_to_come_back():
    bench = Bench(config=SchedulerConfig(lease_s=7.0))
    assert "no prefill and no decode" in of(Refuse, bench.submit("r"))[0].message
    bench.step(instance("d0"))
    found = bench.submit("r")
    assert of(Refuse, found)[0].code == "unavailable" and of(Refuse, found)[0].retry_after_s == 7.0
    assert "no prefill instance takes" in of(Refuse, found)[0].message
    bench.step(instance("p0", model="other"))
    assert "same model" in of(Refuse, bench.submit("r"))[0].message


@pytest.mark.parametrize(
    "prompt, new, choices",
    [
        (1600, 1, 1),  # 101 pages
        (40, 120, 16),  # 2 shared, 8 for each of 16
        (1000, 100, 1),  # past the context
        (1008, 1, 1),  # past the prefill instance's pages
        (10, 1, 65),  # past the batch
    ],
)
def test_what_fits_nowhere_is_too_large(prompt, new, choices):
    bench = Bench(instance("p0", pages=62), instance("d0", context=1050))
    refusal = of(Refuse, bench.submit("r", prompt, new, choices=choices))[0]
    assert refusal.code == "too_large" and refusal.retry_after_s == 0.0
    assert str(prompt) in refusal.message


def test_what_fits_when_empty_waits_instead():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("a", 1000, 24)
    assert not of(Refuse, bench.submit("b", 1000, 24))
    assert bench.machine.queued == 1


def test_the_queue_is_bounded_in_requests():
    bench = Bench(
        instance("p0"),
        instance("d0"),
        config=SchedulerConfig(tasks_ahead=1, max_queue_requests=2),
    )
    for name in ("a", "b", "c"):
        assert of(Place, bench.submit(name, 100))
    refusal = of(Refuse, bench.submit("d", 100))[0]
    assert refusal.code == "overloaded" and refusal.retry_after_s == 1.0
    bench.computed("p0", "a")
    assert of(Place, bench.submit("d", 100))


def test_the_queue_is_bounded_in_seconds_an_instance():
    config = SchedulerConfig(tasks_ahead=1, max_queue_s=2.0)
    bench = Bench(instance("p0", seconds_a_token=0.01), instance("d0", pages=1000), config=config)
    bench.submit("a", 300)
    bench.submit("b", 600)  # an empty queue takes any length
    refusal = of(Refuse, bench.submit("c", 10))[0]
    assert refusal.code == "overloaded"
    assert refusal.retry_after_s == pytest.approx(4.0 + 6.0)  # beyond the limit, and one request


def test_mixed_instances_alone_bound_their_queue_too():
    mixed = replace(instance("d0", pages=1000, seconds_a_token=0.01), role="mixed")
    bench = Bench(mixed, config=SchedulerConfig(max_queue_s=2.0))
    assert of(RunPrefill, bench.submit("a", 300))[0].instance_id == "d0"


# ---- deaths


def test_a_dead_prefill_instance_gives_its_requests_back_in_their_old_order():
    bench = Bench(instance("p0"), instance("d0"), instance("d1"))
    for name in ("a", "b", "c"):
        bench.submit(name)
    home = {e.request_id: e.decode_id for e in of(Place, bench.all)}
    found = bench.died("p0")
    assert {("a"), ("b"), ("c")} == {request_id for _, request_id in cancelled_on(found)}
    for name in ("a", "b", "c"):
        bench.released(home[name], name)
    found = bench.step(instance("p1"))
    assert [e.request_id for e in of(Place, found)] == ["a", "b", "c"]
    assert [e.request_id for e in of(RunPrefill, found)] == ["a", "b"]


def test_an_instance_that_still_holds_an_attempt_does_not_get_the_next_one():
    bench = Bench(instance("p0"), instance("p1"), instance("d0"))
    bench.submit("a")
    assert not of(Place, bench.died("p0"))  # d0 has not let go yet
    other = bench.submit("b")  # and b does not wait behind a
    assert of(RunPrefill, other)[0].instance_id == "p1"
    found = bench.released("d0", "a")
    assert [e.request_id for e in of(Place, found)] == ["a"]
    assert of(RunPrefill, found)[0].instance_id == "p1"


def test_prefill_deaths_are_bounded_by_max_attempts():
    bench = Bench(instance("d0"), config=SchedulerConfig(max_attempts=2))
    for generation in (1, 2):
        bench.step(instance("p0", generation=generation))
        if generation == 1:
            bench.submit("a")
        found = bench.step(events.InstanceLeft(instance_id="p0", generation=generation))
        bench.released("d0", "a")
    assert of(Fail, found)[0].message == "prefill p0 died; 2 attempts were made"
    assert not of(Fail, found)[0].resumable
    assert states(found) == ["failed"]


def test_a_dead_decode_instance_means_a_new_place_before_the_first_token():
    bench = Bench(instance("p0"), instance("p1"), instance("d0"), instance("d1"))
    first = of(Place, bench.submit("a"))[0]
    found = bench.died(first.decode_id)
    assert cancelled_on(found) == [("p0", "a")]
    assert of(Place, found)[0].decode_id != first.decode_id
    assert of(RunPrefill, found)[0].instance_id == "p1"
    assert bench.machine.requests["a"].attempts == 2


def test_a_queued_request_of_a_dead_decode_instance_loses_no_attempt():
    bench = Bench(instance("p0"), instance("d0"), config=SchedulerConfig(tasks_ahead=1))
    bench.submit("a")
    bench.submit("b")
    bench.died("d0")
    assert {r.id: r.attempts for r in bench.machine.requests.values()} == {"a": 1, "b": 0}


@pytest.mark.parametrize("dead", ["p0", "d0"])
def test_after_the_last_chunk_a_death_fails_the_request(dead):
    bench = Bench(instance("p0"), instance("p1"), instance("d0"), instance("d1"))
    bench.submit("a")
    bench.computed("p0", "a")
    found = bench.died(dead)
    assert "after the first token" in of(Fail, found)[0].message
    assert of(Fail, found)[0].resumable
    assert cancelled_on(found) == [("d0" if dead == "p0" else "p0", "a")]


def test_a_prefill_instance_whose_cache_has_landed_is_not_needed_any_more():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("a")
    bench.submit("b")
    for name in ("a", "b"):
        bench.computed("p0", name)
    bench.decoding("d0", "a")  # a: landed, not yet released
    bench.released("p0", "b")  # b: released, decode has not said so yet
    assert not of(Fail, bench.died("p0"))
    bench.decoding("d0", "b")
    assert len(bench.machine.requests) == 2


def test_a_second_life_replaces_the_first_and_old_news_is_ignored():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("a")
    found = bench.step(instance("p0", generation=2))
    assert cancelled_on(found) == [("d0", "a")]
    bench.released("d0", "a")
    ignored = bench.machine.ignored
    assert not bench.computed("p0", "a") and not bench.died("p0")  # generation 1
    assert bench.machine.ignored == ignored + 2
    assert bench.machine.requests["a"].state is RequestState.PREFILLING


def test_without_prefill_for_its_model_a_request_moves_to_the_other_pool():
    config = SchedulerConfig(tasks_ahead=1)
    bench = Bench(instance("p0"), instance("d0", pages=1000), config=config)
    bench.submit("a")
    bench.submit("b")
    bench.step(instance("p1", model="next"))
    bench.step(instance("d1", model="next"))
    found = bench.drains("p0")
    assert [(e.request_id, e.decode_id) for e in of(Place, found)] == [("b", "d1")]
    assert [(e.instance_id, e.request_id) for e in of(RunPrefill, found)] == [("p1", "b")]
    bench.serve("a")
    assert "finished" in states(bench.all)


def test_a_draining_instance_gets_nothing_new():
    bench = Bench(instance("p0"), instance("p1"), instance("d0"), instance("d1"))
    bench.drains("p0")
    bench.drains("d0")
    found = bench.submit("a")
    assert of(Place, found)[0].decode_id == "d1"
    assert of(RunPrefill, found)[0].instance_id == "p1"


# ---- failures that workers report


@pytest.mark.parametrize("who", ["p0", "d0"])
def test_a_retryable_failure_is_prefilled_again_elsewhere(who):
    bench = Bench(instance("p0"), instance("p1"), instance("d0"), instance("d1"))
    bench.submit("a")
    found = bench.failed(who, "a")
    other = {"p0": "d0", "d0": "p0"}[who]
    assert cancelled_on(found) == [(other, "a")]
    assert of(RunPrefill, found)[0].instance_id == "p1"
    assert of(Place, found)[0].decode_id == "d1"


def test_a_failure_that_is_not_retryable_ends_the_request():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("a")
    found = bench.failed("p0", "a", retryable=False)
    assert of(Fail, found)[0].message == "prefill p0: out of luck"
    assert cancelled_on(found) == [("d0", "a")]


def test_no_failure_is_retried_after_the_last_chunk():
    bench = Bench(instance("p0"), instance("d0"), instance("d1"))
    bench.submit("a")
    bench.computed("p0", "a")
    assert of(Fail, bench.failed("p0", "a"))


def test_a_failed_task_frees_its_slot_at_once_and_its_pages_on_release():
    bench = Bench(instance("p0", pages=14), instance("d0"), config=SchedulerConfig(tasks_ahead=1))
    bench.submit("a", 100)  # 7 pages
    bench.submit("b", 100)
    found = bench.failed("p0", "a", retryable=False)
    assert [e.request_id for e in of(RunPrefill, found)] == ["b"]
    assert bench.machine.cluster.instances["p0"].free_pages == 0
    bench.released("p0", "a")
    assert bench.machine.cluster.instances["p0"].free_pages == 7


def test_a_worker_that_lets_go_too_early_gave_up():
    bench = Bench(instance("p0"), instance("p1"), instance("d0"), instance("d1"))
    bench.submit("a")
    assert of(Place, bench.released("p0", "a"))  # on to p1
    bench.computed("p1", "a")
    bench.decoding("d1", "a")
    assert of(Fail, bench.finished("d1", "a", "cancelled"))


# ---- cancels


def in_state(state: RequestState) -> Bench:
    bench = Bench(instance("p0"), instance("d0"), config=SchedulerConfig(tasks_ahead=1))
    bench.submit("other")
    bench.submit("a", 10, 6)
    if state is RequestState.QUEUED:
        return bench
    bench.computed("p0", "other")
    if state is RequestState.PREFILLING:
        return bench
    bench.computed("p0", "a")
    if state is RequestState.DECODING:
        bench.decoding("d0", "a")
    return bench


@pytest.mark.parametrize(
    "state, told",
    [
        (RequestState.QUEUED, ["d0"]),
        (RequestState.PREFILLING, ["p0", "d0"]),
        (RequestState.TRANSFERRING, ["p0", "d0"]),
        (RequestState.DECODING, ["p0", "d0"]),
    ],
)
def test_a_cancel_frees_everything_in_every_state(state, told):
    bench = in_state(state)
    assert bench.machine.requests["a"].state is state
    found = bench.cancel("a")
    assert cancelled_on(found) == [(name, "a") for name in told]
    assert states(found) == ["cancelled"]
    for name in told:
        bench.released(name, "a")
    assert all("a" not in i.holdings for i in bench.machine.cluster.instances.values())
    assert not bench.cancel("a")


def test_a_stop_string_finishes_the_request():
    bench = in_state(RequestState.DECODING)
    assert states(bench.cancel("a", "stop")) == ["finished"]


def test_a_proxy_that_leaves_takes_its_requests_along_and_no_others():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("a", proxy="x")
    bench.submit("b", proxy="y")
    found = bench.step(events.ProxyLeft(proxy_id="x"))
    assert states(found) == ["cancelled"]
    assert list(bench.machine.requests) == ["b"]


# ---- time


def test_a_request_past_its_deadline_fails():
    bench = Bench(instance("p0"), instance("d0"), config=SchedulerConfig(request_timeout_s=10))
    bench.submit("a")
    assert not bench.tick(9.9)
    found = bench.tick(0.2)
    assert "longer than 10 s" in of(Fail, found)[0].message
    assert cancelled_on(found) == [("p0", "a"), ("d0", "a")]


def test_pages_that_a_worker_never_speaks_of_again_are_freed_and_counted():
    bench = Bench(instance("p0"), instance("d0"), config=SchedulerConfig(release_timeout_s=10))
    bench.submit("a")
    bench.cancel("a")
    bench.tick(9.9)
    assert bench.machine.cluster.instances["d0"].virtual_pages == 8
    bench.tick(0.2)
    assert bench.machine.release_timeouts == 2
    assert bench.machine.cluster.instances["d0"].virtual_pages == 0


def test_only_what_was_left_behind_times_out():
    config = SchedulerConfig(release_timeout_s=10, tasks_ahead=1)
    bench = Bench(instance("p0"), instance("d0"), config=config)
    bench.submit("a")
    bench.cancel("a")
    bench.released("p0", "a")
    bench.released("d0", "a")
    bench.submit("a")  # the same id again, another request
    assert not bench.tick(10.1)
    assert bench.machine.release_timeouts == 0
    assert bench.machine.requests["a"].state is RequestState.PREFILLING


def test_a_batch_shrinks_by_all_choices_of_a_request():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("a", choices=3)
    bench.computed("p0", "a")
    bench.decoding("d0", "a")
    assert bench.machine.cluster.instances["d0"].batch_size == 3
    bench.finished("d0", "a")
    assert bench.machine.cluster.instances["d0"].batch_size == 0


# ---- what must change nothing


def test_doubles_and_strangers_are_ignored_and_counted():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("a")
    for again in (
        lambda: bench.submit("a", 50),
        lambda: bench.step(instance("p0")),
        lambda: bench.chunk_started("p0", "nobody"),
        lambda: bench.computed("d0", "a"),
        lambda: bench.decoding("p0", "a"),
        lambda: bench.finished("p0", "a"),
        lambda: bench.released("p9", "a"),
        lambda: bench.failed("p0", "nobody"),
        lambda: bench.cancel("nobody"),
    ):
        before = bench.machine.ignored
        assert again() == []
        assert bench.machine.ignored == before + 1
    assert bench.machine.requests["a"].prompt_tokens == 100


def test_check_integrity_finds_a_leak():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("a")
    decode = bench.machine.cluster.instances["d0"]
    decode.virtual_pages += 1
    with pytest.raises(IntegrityError, match="d0: virtual pages: kept 9, counted 8"):
        bench.machine.check_integrity()
    decode.virtual_pages -= 1
    del bench.machine.cluster.instances["p0"].holdings["a"]
    with pytest.raises(IntegrityError, match="p0"):
        bench.machine.check_integrity()
