"""A request that loses its prefill goes on behind what landed at decode."""

from __future__ import annotations

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.effects import AdmitDecode, CancelOn, Fail, Place, Record, RunPrefill
from millrace.core.lifecycle import MIN_KEPT_TOKENS
from millrace.core.request import Chunk, Request, RequestState
from support.core_events import Bench, groups_of, instance, of
from support.prefill_fleet import scripted


def bench(prefills: int = 2, decodes: int = 1, **settings) -> Bench:
    fleet = [
        instance(f"p{i}", pages=1000, latency=groups_of(1, 2), node="n", context=100_000)
        for i in range(prefills)
    ]
    fleet += [instance(f"d{i}", pages=1000, context=100_000) for i in range(decodes)]
    return Bench(*fleet, config=SchedulerConfig(**settings))


def grouped(**settings) -> Bench:
    """A prompt of 1000 tokens: 400 on p0, the rest on p0 and p1; p2 is free."""
    return scripted(bench(3, **settings), {1000: [(400, (0,)), (600, (0, 1))]})


def the(one: Bench) -> Request:
    (request,) = one.machine.requests.values()
    return request


def told(found) -> list[tuple[str, int, int]]:
    return [(e.instance_id, e.attempt, e.kept_tokens) for e in of(AdmitDecode, found)]


def cancelled(found) -> list[str]:
    return sorted(e.instance_id for e in of(CancelOn, found))


def parts(chunks: tuple[Chunk, ...]) -> list[tuple[int, int]]:
    return [(chunk.start_token, chunk.num_tokens) for chunk in chunks]


# ---- what is kept


def test_the_rest_is_computed_elsewhere_and_decode_stays() -> None:
    one = bench()
    assert told(one.submit("a", 1000)) == [("d0", 1, 0)]
    (record,) = of(Record, one.landed("a", 300))
    assert (record.state, record.kv_tokens) == (RequestState.PREFILLING, 300)
    found = one.died("p0")
    assert not of(Place, found) and cancelled(found) == []
    assert [type(e) for e in found if isinstance(e, AdmitDecode | RunPrefill)] == [
        AdmitDecode,
        RunPrefill,
    ]
    assert told(found) == [("d0", 2, 300)]
    (run,) = of(RunPrefill, found)
    assert (run.instance_id, run.attempt, parts(run.chunks)) == ("p1", 2, [(300, 700)])
    assert the(one).predicted_prefill_s == pytest.approx(0.7)
    one.serve("a", "p1")
    assert not one.machine.requests


def test_a_lost_member_frees_the_others_which_take_part_once_they_let_go() -> None:
    one = scripted(bench(2), {1000: [(400, (0,)), (600, (0, 1))]})
    one.submit("a", 1000)
    one.landed("a", 400)
    found = one.died("p1")
    assert cancelled(found) == ["p0"] and told(found) == [("d0", 2, 400)]
    assert not of(RunPrefill, found)  # p0 still holds the earlier attempt
    (run,) = of(RunPrefill, one.released("p0", "a"))
    assert (run.instance_id, run.attempt) == ("p0", 2)


@pytest.mark.parametrize("landed", [0, MIN_KEPT_TOKENS - 1])
def test_too_little_is_not_worth_it(landed) -> None:
    one = bench()
    one.submit("a", 1000)
    if landed:
        one.landed("a", landed)
    found = one.died("p0")
    assert cancelled(found) == ["d0"] and not told(found)
    assert told(one.released("d0", "a")) == [("d0", 2, 0)]
    assert (the(one).kept_tokens, the(one).landed_tokens) == (0, 0)


def test_the_last_token_is_always_computed() -> None:
    one = bench()
    one.submit("a", 1000)
    one.landed("a", 5000)
    (run,) = of(RunPrefill, one.died("p0"))
    assert parts(run.chunks) == [(999, 1)]


def test_a_decode_that_dies_takes_the_prefix_with_it() -> None:
    one = bench(3, decodes=2)
    one.submit("a", 1000)
    one.landed("a", 500)
    one.died("p0")
    found = one.died("d0")
    assert [e.decode_id for e in of(Place, found)] == ["d1"]
    assert told(found) == [("d1", 3, 0)] and cancelled(found) == ["p1"]
    (run,) = of(RunPrefill, found)
    assert (run.instance_id, run.attempt, parts(run.chunks)) == ("p2", 3, [(0, 1000)])


def test_who_wants_the_prompts_logprobs_begins_anew() -> None:
    one = bench()
    one.submit("a", 1000)
    the(one).resumable = False
    one.landed("a", 500)
    assert cancelled(one.died("p0")) == ["d0"]


def test_without_a_prefill_instance_it_waits_for_one() -> None:
    one = bench(1)
    one.submit("a", 1000)
    one.landed("a", 500)
    assert told(one.died("p0")) == [("d0", 2, 500)]
    (run,) = of(RunPrefill, one.step(instance("p7", pages=1000, context=100_000)))
    assert parts(run.chunks) == [(500, 500)]


def test_after_token_one_there_is_no_way_back() -> None:
    one = bench()
    one.submit("a", 1000)
    one.landed("a", 500)
    one.computed("p0", "a")
    assert of(Fail, one.died("p0"))


# ---- what decode and members say


def test_decode_that_keeps_a_prefix_says_so_itself() -> None:
    one = bench()
    one.submit("a", 1000)
    one.landed("a", 500)
    found = one.failed("d0", "a", attempt=1, kept_tokens=300)
    assert told(found) == [("d0", 2, 300)] and cancelled(found) == ["p0"]


def test_decode_that_keeps_too_little_is_told_to_let_go() -> None:
    one = bench()
    one.submit("a", 1000)
    found = one.failed("d0", "a", attempt=1, kept_tokens=5)
    assert cancelled(found) == ["d0", "p0"]


@pytest.mark.parametrize("kept_tokens", [0, 500])
def test_what_decode_says_of_an_earlier_attempt_is_old_news(kept_tokens) -> None:
    one = bench()
    one.submit("a", 1000)
    one.landed("a", 500)
    one.died("p0")
    ignored = one.machine.ignored
    assert one.failed("d0", "a", attempt=1, kept_tokens=kept_tokens) == []
    assert one.released("d0", "a", attempt=1) == []
    assert one.landed("a", 700, attempt=1) == []
    assert one.machine.ignored == ignored + 3
    assert (the(one).attempt, the(one).kept_tokens) == (2, 500)
    one.landed("a", 700, attempt=2)
    assert the(one).landed_tokens == 700


def test_decode_had_it_all_when_prefill_died() -> None:
    """Token one is out, and the next attempt was not yet sent or is in vain."""
    for prefills, reason in ((1, None), (2, None), (1, "stop")):
        one = bench(prefills)
        one.submit("a", 1000)
        one.landed("a", 1000)
        one.died("p0")
        if reason is None:
            one.decoding("d0", "a")
            assert the(one).state is RequestState.DECODING
            if prefills == 2:
                one.failed("p1", "a")  # decode refuses it
        one.finished("d0", "a")
        assert not one.machine.requests and not of(Fail, one.all)


def test_a_member_that_did_its_part_frees_its_pages_and_its_turn() -> None:
    one = grouped()
    one.submit("a", 1000)
    one.computed("p0", "a", 0, last=False)
    p1 = one.machine.cluster.instances["p1"]
    assert p1.used_pages and len(p1.queue) == 1
    one.released("p1", "a", complete=True)
    assert (p1.used_pages, p1.queue) == (0, [])
    assert the(one).state is RequestState.PREFILLING
    assert not of(CancelOn, one.died("p1"))  # nothing of the request is there any more
    one.computed("p0", "a", 1)
    one.released("p0", "a", complete=True)
    one.decoding("d0", "a")
    one.finished("d0", "a")
    assert not one.machine.requests


def test_a_leader_that_lets_go_while_it_computes_gave_up() -> None:
    one = grouped()
    one.submit("a", 1000)
    assert cancelled(one.released("p0", "a", complete=True)) == ["d0", "p1"]


# ---- how often


def test_attempts_that_got_on_are_not_counted() -> None:
    one = bench(2, max_attempts=2)
    one.submit("a", 1000)
    for attempt in range(1, 7):
        one.landed("a", attempt * 100, attempt=attempt)
        (run,) = of(RunPrefill, one.all)[-1:]
        one.failed(run.instance_id, "a")
        one.released(run.instance_id, "a")
    assert (the(one).kept_tokens, the(one).attempt, the(one).attempts) == (600, 7, 1)


def test_attempts_that_got_nowhere_are() -> None:
    one = bench(2, max_attempts=2)
    one.submit("a", 1000)
    one.landed("a", 500)
    for _ in range(2):
        (run,) = of(RunPrefill, one.all)[-1:]
        found = one.failed(run.instance_id, "a")
        found += one.released(run.instance_id, "a")
    assert not of(Fail, found)
    (run,) = of(RunPrefill, one.all)[-1:]
    found = one.failed(run.instance_id, "a")
    assert "2 attempts were made" in of(Fail, found)[0].message
    assert cancelled(found) == ["d0"]
