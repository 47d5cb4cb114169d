"""An instance's reports of its prefix cache, and the requests that they attract."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.cost.correction import band_of
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.scheduler.effects import Effect, RunPrefill
from millrace.core.scheduler.fleet.cached_prefixes import CachedPrefixes
from millrace.core.scheduler.reports import CachedBlocks
from support.core_events import Bench, instance, of

BLOCKS = tuple(range(1000, 1100))
IN_ORDER = SchedulerConfig(policy="fcfs", preemption="none")


def prefixes(pages: int = 100, block_tokens: int = 16) -> CachedPrefixes:
    return CachedPrefixes(instance("d0", pages=pages, block_tokens=block_tokens))


def fleet(
    *names: str, prefills: int = 1, config: SchedulerConfig = IN_ORDER, pages=1000, **more
) -> Bench:
    cards = [instance(f"p{i}", pages=1000, block_tokens=16, **more) for i in range(prefills)]
    cards += [instance(name, pages=pages, block_tokens=16, **more) for name in names]
    return Bench(*cards, config=config)


def cache(bench: Bench, instance_id: str, blocks: int) -> list[Effect]:
    return bench.report(instance_id, CachedBlocks(whole=True, added=BLOCKS[:blocks]))


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


def sent_to(found) -> list[tuple[str, int, int]]:
    return [
        (run.instance_id, run.chunks[0].start_token, run.chunks[0].num_tokens)
        for run in of(RunPrefill, found)
    ]


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
    corrections = bench.machine.cluster.corrections
    assert corrections.seconds("p0", band_of(1000), 0.36) == pytest.approx(0.36)
