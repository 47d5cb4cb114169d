"""What an instance says of its prefix cache, and where that takes requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.cached_prefixes import CachedPrefixes
from millrace.core.config import SchedulerConfig
from millrace.core.effects import AdmitDecode, Effect, Place, RunPrefill
from millrace.core.events import CachedBlocks
from millrace.core.latency import Latency, SpLatency
from millrace.core.request import RequestState
from support.core_events import Bench, instance, of

BLOCKS = tuple(range(1000, 1100))
IN_ORDER = SchedulerConfig(policy="fcfs", preemption="none")
ONE_BY_ONE = SchedulerConfig(policy="fcfs", preemption="none", tasks_ahead=1)


def prefixes(pages: int = 100, block_tokens: int = 16) -> CachedPrefixes:
    return CachedPrefixes(instance("d0", pages=pages, block_tokens=block_tokens))


def fleet(
    *names: str, prefills: int = 1, config: SchedulerConfig = IN_ORDER, pages=1000, **more
) -> Bench:
    cards = [instance(f"p{i}", pages=1000, block_tokens=16, **more) for i in range(prefills)]
    cards += [instance(name, pages=pages, block_tokens=16, **more) for name in names]
    return Bench(*cards, config=config)


def cache(bench: Bench, instance_id: str, blocks: int) -> list[Effect]:
    return bench.heartbeat(instance_id, cached=CachedBlocks(whole=True, added=BLOCKS[:blocks]))


def kept(found) -> tuple[str, int]:
    (admitted,) = of(AdmitDecode, found)
    return admitted.instance_id, admitted.kept_tokens


# ---- what is known


def test_blocks_come_and_go():
    known = prefixes()
    assert known.tokens(BLOCKS, 1600) == 0
    known.heard(CachedBlocks(whole=True, added=BLOCKS[:4]))
    known.heard(CachedBlocks(added=BLOCKS[4:6], removed=(1, 2)))
    assert known.tokens(BLOCKS, 1600) == 96 and known.tokens(BLOCKS[:2], 1600) == 32
    known.heard(CachedBlocks(removed=BLOCKS[3:6]))
    assert known.tokens(BLOCKS, 1600) == 48
    known.heard(CachedBlocks(whole=True))
    assert known.tokens(BLOCKS, 1600) == 0


def test_the_last_token_is_always_computed():
    known = prefixes()
    known.heard(CachedBlocks(added=BLOCKS))
    assert [known.tokens(BLOCKS, prompt) for prompt in (1, 16, 17, 32, 33)] == [0, 0, 16, 16, 32]


def test_another_prompt_has_nothing_there():
    known = prefixes()
    known.heard(CachedBlocks(added=BLOCKS))
    assert known.tokens((7, *BLOCKS[1:]), 1600) == known.tokens((), 1600) == 0


def test_more_blocks_than_pages_are_forgotten():
    known = prefixes(pages=10)
    known.heard(CachedBlocks(added=BLOCKS[:10]))
    assert known.tokens(BLOCKS, 1600) == 160
    known.heard(CachedBlocks(added=BLOCKS[10:11]))
    assert known.tokens(BLOCKS, 1600) == 0


def test_who_keeps_none_is_believed_to_have_none():
    known = prefixes(block_tokens=0)
    known.heard(CachedBlocks(added=BLOCKS))
    assert known.tokens(BLOCKS, 1600) == 0


@given(have=st.integers(0, 100), asked=st.integers(0, 100), prompt=st.integers(1, 1700))
def test_looking_takes_few_steps_and_finds_what_counting_finds(have, asked, prompt):
    known = prefixes()
    known.heard(CachedBlocks(added=BLOCKS[:have]))
    assert known.tokens(BLOCKS[:asked], prompt) == 16 * min(have, asked, (prompt - 1) // 16)


# ---- decode


def test_a_request_goes_where_its_beginning_is():
    bench = fleet("d0", "d1")
    cache(bench, "d1", 40)
    found = bench.submit("a", 1000, prefix=BLOCKS[:62])
    assert kept(found) == ("d1", 640)
    (run,) = of(RunPrefill, found)
    assert [(c.start_token, c.num_tokens) for c in run.chunks] == [(640, 360)]
    (placed,) = of(Place, found)
    assert placed.predicted_ttft_s == pytest.approx(0.36)  # a millisecond a token
    assert kept(bench.submit("b", 1000, prefix=(5, 6, 7)))[1] == 0
    bench.serve("a", decode="d1")
    assert not bench.machine.ignored


def test_little_saved_is_no_reason():
    bench = fleet("d0", "d1")
    cache(bench, "d1", 6)
    assert kept(bench.submit("a", 1000, prefix=BLOCKS)) == ("d0", 0)  # 96 ms of a second
    cache(bench, "d1", 7)
    assert kept(bench.submit("b", 1000, prefix=BLOCKS)) == ("d1", 112)
    cache(bench, "d0", 3)
    assert kept(bench.submit("c", 150, prefix=BLOCKS[:9])) == ("d1", 112)  # 48 are too few


def test_of_those_that_keep_as_much_the_freest():
    bench = fleet("d0", "d1", "d2")
    for home in ("d1", "d2"):
        cache(bench, home, 40)
    homes = [kept(bench.submit(name, 1000, 100, prefix=BLOCKS))[0] for name in "abc"]
    assert homes == ["d1", "d2", "d1"]


def test_a_full_instance_or_batch_is_passed_by():
    bench = fleet("d0", "d1", pages=100)
    cache(bench, "d1", 40)
    assert kept(bench.submit("a", 1000, prefix=BLOCKS)) == ("d1", 640)
    assert kept(bench.submit("b", 1000, prefix=BLOCKS)) == ("d0", 0)
    bench = fleet("d0", "d1", batch=1)
    cache(bench, "d1", 40)
    assert kept(bench.submit("a", 1000, prefix=BLOCKS)) == ("d1", 640)
    assert kept(bench.submit("b", 1000, prefix=BLOCKS)) == ("d0", 0)


@pytest.mark.parametrize("fields", [{"choices": 2}, {"resumable": False}])
def test_several_choices_and_log_probabilities_are_computed_anew(fields):
    bench = fleet("d0", "d1")
    cache(bench, "d1", 40)
    assert kept(bench.submit("a", 1000, prefix=BLOCKS, **fields)) == ("d0", 0)


def test_a_spread_request_is_computed_anew():
    config = SchedulerConfig(max_kv_tokens_per_worker=800)
    bench = fleet("d0", "k0", config=config)
    cache(bench, "d0", 40)
    (admitted,) = of(AdmitDecode, bench.submit("a", 1000, prefix=BLOCKS))
    assert admitted.shards and not admitted.kept_tokens


def test_who_no_longer_has_it_says_so_and_all_is_computed():
    bench = fleet("d0", config=ONE_BY_ONE)
    cache(bench, "d0", 40)
    bench.submit("first", 1000)
    bench.submit("a", 1000, prefix=BLOCKS)
    bench.failed("d0", "a", attempt=1)
    request = bench.machine.requests["a"]
    assert request.state is RequestState.QUEUED and not request.kept_tokens
    found = bench.released("d0", "a", attempt=1)
    (admitted,) = of(AdmitDecode, found)
    assert (admitted.attempt, admitted.kept_tokens) == (2, 0)


def test_a_prefill_that_is_lost_goes_on_behind_what_the_cache_gave():
    bench = fleet("d0", prefills=2)
    cache(bench, "d0", 40)
    bench.submit("a", 1000, prefix=BLOCKS)
    (admitted,) = of(AdmitDecode, bench.died("p0"))
    assert (admitted.attempt, admitted.kept_tokens) == (2, 640)


def test_decode_has_not_begun_while_only_its_cache_is_there():
    bench = fleet("d0", config=ONE_BY_ONE)
    cache(bench, "d0", 40)
    bench.submit("first", 1000)
    bench.submit("a", 1000, prefix=BLOCKS)
    before = bench.machine.ignored
    bench.decoding("d0", "a")
    assert bench.machine.ignored == before + 1


def test_a_new_life_has_an_empty_cache():
    bench = fleet("d0", "d1")
    cache(bench, "d1", 40)
    bench.step(instance("d1", generation=2, pages=1000, block_tokens=16))
    assert kept(bench.submit("a", 1000, prefix=BLOCKS)) == ("d0", 0)


def test_a_mixed_instance_computes_behind_its_own_cache():
    bench = Bench(*(instance(name, pages=1000, block_tokens=16) for name in ("m0", "m1")))
    cache(bench, "m1", 40)
    found = bench.submit("a", 1000, prefix=BLOCKS)
    assert kept(found) == ("m1", 640)
    (run,) = of(RunPrefill, found)
    assert [(c.start_token, c.num_tokens) for c in run.chunks] == [(640, 360)]


# ---- prefill


def sent_to(found) -> list[tuple[str, int, int]]:
    return [
        (run.instance_id, run.chunks[0].start_token, run.chunks[0].num_tokens)
        for run in of(RunPrefill, found)
    ]


def test_a_prompt_is_prefilled_where_its_beginning_is():
    bench = fleet("d0", prefills=2)
    cache(bench, "p1", 40)
    assert sent_to(bench.submit("a", 1000, prefix=BLOCKS)) == [("p1", 0, 1000)]
    assert bench.machine.requests["a"].predicted_prefill_s == pytest.approx(0.36)
    # p0 computes it in a second; p1 would begin in 0.36 s and need 0.36 s more.
    assert sent_to(bench.submit("b", 1000, prefix=BLOCKS)) == [("p1", 0, 1000)]
    # Now p1 would end after 1.08 s.
    assert sent_to(bench.submit("c", 1000, prefix=BLOCKS)) == [("p0", 0, 1000)]


def test_who_waits_for_a_cached_beginning_goes_to_the_first_that_has_it():
    bench = fleet("d0", prefills=2, config=ONE_BY_ONE)
    cache(bench, "p0", 40)
    assert sent_to(bench.submit("a", 1000, prefix=BLOCKS)) == [("p0", 0, 1000)]
    assert not sent_to(bench.submit("b", 1000, prefix=BLOCKS))  # p1 would need longer than waiting
    assert sent_to(cache(bench, "p1", 40)) == [("p1", 0, 1000)]


def test_eq_1_prices_what_is_behind_a_cached_beginning():
    """a + b L + c C L + d L^2 with L = 360 and C = 640, against a group of two at C = 0."""
    latency = SpLatency(
        by_sp={1: Latency(a=0.1, b=1e-3, c=1e-6, d=5e-7), 2: Latency(a=0.1, b=2e-4)}
    )
    config = SchedulerConfig(planner="esp", policy="fcfs")
    bench = fleet("d0", prefills=2, config=config, latency=latency)
    cache(bench, "p1", 40)
    bench.submit("a", 1000, prefix=BLOCKS)
    assert len(bench.machine.requests["a"].chunks[0].instance_ids) == 2  # 0.3 s; alone 0.755 s
    cache(bench, "p1", 60)
    bench.cancel("a")
    for one in ("p0", "p1"):
        bench.released(one, "a")
    assert sent_to(bench.submit("b", 1000, prefix=BLOCKS)) == [("p1", 0, 1000)]
    expected_s = 0.1 + 1e-3 * 40 + 1e-6 * 960 * 40 + 5e-7 * 40**2
    assert bench.machine.requests["b"].predicted_prefill_s == pytest.approx(expected_s)


def test_what_was_observed_is_held_against_what_was_computed():
    bench = fleet("d0", prefills=1)
    cache(bench, "p0", 40)
    bench.submit("a", 1000, prefix=BLOCKS)
    bench.chunk_started("p0", "a")
    bench.computed("p0", "a", compute_s=0.36)
    assert bench.machine.cluster.corrections.factor("p0") == pytest.approx(1.0)


def test_decodes_copy_is_left_where_prefill_has_as_much():
    """Prefill's is sent as it is; decode's would have to be sent back first."""
    bench = fleet("d0", prefills=1)
    for one in ("d0", "p0"):
        cache(bench, one, 40)
    found = bench.submit("a", 1000, prefix=BLOCKS)
    assert kept(found) == ("d0", 0) and sent_to(found) == [("p0", 0, 1000)]
    cache(bench, "d0", 50)
    found = bench.submit("b", 1000, prefix=BLOCKS)
    assert kept(found) == ("d0", 800) and sent_to(found) == [("p0", 800, 200)]


def test_an_instance_without_pages_is_no_place_for_it():
    bench = Bench(
        instance("p0", pages=70, block_tokens=16),
        instance("p1", pages=1000, block_tokens=16),
        instance("d0", pages=1000),
        config=IN_ORDER,
    )
    cache(bench, "p0", 40)
    assert sent_to(bench.submit("a", 1000, prefix=BLOCKS)) == [("p0", 0, 1000)]
    assert sent_to(bench.submit("b", 1000, prefix=BLOCKS)) == [("p1", 0, 1000)]
