"""Placement examines few instances closely, and chooses as a plain scan of all instances would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.errors import IntegrityError
from millrace.core.request import Request
from millrace.core.scheduler.dispatch.decode_placement import LEAST_SAVING
from millrace.core.scheduler.effects import Place
from millrace.core.scheduler.fleet.freeness import freeness
from millrace.core.scheduler.fleet.instances import DecodeInstance
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.reports import CachedBlocks
from support.core_events import Bench, instance, of, request

BLOCK_TOKENS = 32
DECODES = ("d0", "d1", "d2", "d3")
BLOCKS = tuple(range(40))

homes = st.sampled_from(DECODES)
arrivals = st.tuples(st.just("arrives"), st.integers(1, 600), st.integers(1, 60), st.booleans())
news = st.tuples(st.sampled_from(["decodes", "ends"]), st.integers(0, 30))
heartbeats = st.tuples(st.just("tells"), homes, st.integers(0, 60))
caches = st.tuples(st.just("caches"), homes, st.integers(0, 20))


def plain_choice(machine: Machine, asked: Request) -> str | None:
    """Returns the KV owner by the definitions, from every instance's own numbers."""
    instances = [machine.cluster.instances[name] for name in DECODES]
    able = [
        one
        for one in instances
        if isinstance(one, DecodeInstance) and one.could_hold(asked) and one.has_pages(asked)
    ]
    if not able:
        return None
    blocks = {one.id: one.prefixes.tokens(asked.prefix_hashes, asked.prompt_tokens) for one in able}
    kept = {name: tokens if tokens >= 64 else 0 for name, tokens in blocks.items()}
    most = max(kept.values())
    owner = min(able, key=by_freeness)
    if most - kept[owner.id] < max(1.0, LEAST_SAVING * asked.prompt_tokens):
        return owner.id
    return min((one for one in able if kept[one.id] == most), key=by_freeness).id


def by_freeness(one: DecodeInstance) -> tuple[float, str]:
    free, virtual = one.free_pages * one.page_tokens, one.virtual_pages * one.page_tokens
    return -freeness(free, virtual, one.batch_size), one.id


@given(
    st.sampled_from(["whole", "grow"]),
    st.lists(st.one_of(arrivals, arrivals, news, heartbeats, caches), max_size=40),
)
def test_placement_chooses_what_a_plain_scan_chooses(reserve, happenings):
    config = SchedulerConfig(decode_reserve=reserve, decode_headroom_tokens=32, policy="fcfs")
    fleet = [instance(name, pages=60, block_tokens=BLOCK_TOKENS) for name in reversed(DECODES)]
    bench = Bench(instance("p0", pages=10_000), *fleet, config=config)
    for number, happening in enumerate(happenings):
        match happening:
            case "arrives", prompt, new, shares:
                prefix = BLOCKS[: prompt // BLOCK_TOKENS] if shares else ()
                asked = request(f"r{number}", prompt, new, prefix=prefix)
                expected = plain_choice(bench.machine, asked.request)
                others_wait = any(one.decode_id is None for one in bench.machine.requests.values())
                placed = of(Place, bench.step(asked))
                if not others_wait:
                    assert [place.decode_id for place in placed] == [expected][: bool(expected)]
            case "decodes" | "ends" as what, index:
                live = [one for one in bench.machine.requests.values() if one.decode_id]
                if live:
                    chosen = live[index % len(live)]
                    say = bench.decoding if what == "decodes" else bench.finished
                    say(chosen.decode_id, chosen.id)
            case "tells", name, free:
                bench.heartbeat(name, free_pages=free)
            case "caches", name, blocks:
                cached = CachedBlocks(whole=True, added=BLOCKS[:blocks])
                bench.heartbeat(name, free_pages=60)
                bench.report(name, cached)


def test_integrity_finds_a_freeness_and_a_count_that_were_not_kept_up():
    bench = Bench(instance("p0"), instance("d0"))
    bench.machine.cluster.instances["d0"].freeness += 1
    with pytest.raises(IntegrityError, match="d0: freeness: kept 1601"):
        bench.machine.check_integrity()
    bench = Bench(instance("p0"), instance("m0"))
    bench.machine.cluster.pools["h"].prefillers -= 1
    with pytest.raises(IntegrityError, match="prefilling of pool h: kept 1, counted 2"):
        bench.machine.check_integrity()
