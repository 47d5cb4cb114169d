"""KV Parallelism: Mnemosyne section 4.4 and figure 10, Medha section 3.3 and figure 6."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.errors import ConfigError, IntegrityError
from millrace.core.kv.kvp_shards import degree, reserve
from millrace.core.request import Shard
from support.core_events import Bench, instance


@dataclass
class Room:
    id: str
    free_pages: int
    page_tokens: int = 16


def shard(worker_id: str, start: int, end: int) -> Shard:
    return Shard(worker_id=worker_id, start_token=start, end_token=end)


# ---- worked by hand


def test_a_context_grows_over_workers_one_at_a_time():
    """Figure 6: 2M tokens at 512k a worker start on one worker group and end on four."""
    rooms = [Room(f"w{i}", 65536) for i in range(5)]
    found = reserve(2 << 20, rooms, 512 << 10)
    assert found.worker_ids == ("w0", "w1", "w2", "w3")
    lengths = (1, 512 << 10, (512 << 10) + 1, 1 << 20, (1 << 20) + 1, 2 << 20)
    assert [found.degree(tokens) for tokens in lengths] == [1, 1, 2, 2, 3, 4]
    assert [degree(tokens, 512 << 10) for tokens in lengths] == [1, 1, 2, 2, 3, 4]
    assert found.degree(0) == degree(0, 512 << 10) == 1


def test_a_new_worker_joins_once_the_limit_is_reached():
    """Figure 10: chunks of 32 tokens fill the first worker up to t=3; at t=4 the next joins."""
    found = reserve(160, [Room("a", 10), Room("b", 9)], 96)
    joined = [found.onboarded(start, start + 32) for start in range(0, 160, 32)]
    assert joined == [(), (), (), ("b",), ()]
    assert found.growth(64, 128) == (shard("a", 64, 96), shard("b", 96, 128))
    assert found.active(96) == ("a",) and found.active(97) == ("a", "b")
    assert [found.worker_at(p) for p in (0, 95, 96, 159)] == ["a", "a", "b", "b"]


def test_the_freest_come_first_and_equals_by_id():
    rooms = [Room("c", 3), Room("b", 5), Room("a", 3), Room("d", 0)]
    assert reserve(16 * 9, rooms, 16 * 4).shards == (
        shard("b", 0, 64),
        shard("a", 64, 112),  # three pages free: a shorter shard
        shard("c", 112, 144),
    )


def test_the_freer_of_two_that_can_take_a_whole_shard_comes_first():
    assert reserve(16, [Room("a", 5), Room("b", 9)], 64).worker_ids == ("b",)


def test_home_takes_the_first_shard_however_little_room_it_has():
    rooms = [Room("big", 9), Room("owner", 1)]
    assert reserve(40, rooms, 64, owner="owner").shards == (
        shard("owner", 0, 16),
        shard("big", 16, 40),
    )
    assert reserve(40, [Room("big", 9), Room("owner", 0)], 64, owner="owner") is None
    assert reserve(40, [Room("big", 9)], 64, owner="owner") is None


def test_no_more_workers_than_allowed():
    rooms = [Room("a", 4), Room("b", 4), Room("c", 4)]
    assert reserve(129, rooms, 64, max_workers=2) is None
    assert reserve(128, rooms, 64, max_workers=2).worker_ids == ("a", "b")


def test_pages_of_different_sizes_give_the_longest_shards_first():
    """Of 100 tokens at most, pages of 64 hold only 64: the smaller pages give more."""
    rooms = [Room("coarse", 100, page_tokens=64), Room("fine", 2, page_tokens=50)]
    assert reserve(100, rooms, 100, max_workers=1).worker_ids == ("fine",)


@pytest.mark.parametrize(
    "tokens, most, message",
    [
        (0, 64, "kvp: tokens is 0; it must be at least 1"),
        (9, 15, "kvp: max_kv_tokens_per_worker is 15; it must be at least 16, a page of a"),
    ],
)
def test_what_can_not_be_is_said(tokens, most, message):
    with pytest.raises(ConfigError, match=message):
        reserve(tokens, [Room("a", 4)], most)


def test_outside_the_reservation_nothing_has_an_owner():
    found = reserve(20, [Room("a", 4)], 64)
    for wrong in (-1, 20):
        with pytest.raises(ValueError, match="outside the 20 reserved"):
            found.worker_at(wrong)
    with pytest.raises(ValueError, match=r"\[10, 21\) are outside the 20 reserved"):
        found.growth(10, 21)


# ---- the fleet


def fleet(*pages: int, most: int = 64, kvp: int = 0) -> Bench:
    """Decode instances of so many pages of 16 tokens, the last `kvp` of them KVP workers."""
    homes = len(pages) - kvp
    config = SchedulerConfig(
        max_kv_tokens_per_worker=most, policy="fcfs", tasks_ahead=64, max_queue_requests=64
    )
    names = [f"d{i}" if i < homes else f"k{i}" for i in range(len(pages))]
    cards = [instance(name, pages=count) for name, count in zip(names, pages, strict=True)]
    return Bench(instance("p0", pages=10_000), *cards, config=config)


def free(bench: Bench) -> dict[str, int]:
    pool = bench.machine.cluster.pools["h"]
    return {one.id: one.open_pages for one in (*pool.decode.values(), *pool.kvp.values())}


def end(bench: Bench, request_id: str) -> None:
    """Sends all reports of correct instances about a placed request, to its end."""
    request = bench.machine.requests[request_id]
    owner, *workers = request.kv_instance_ids
    bench.computed("p0", request_id)
    bench.released("p0", request_id)
    bench.decoding(owner, request_id)
    bench.finished(owner, request_id)
    for worker in workers:
        bench.released(worker, request_id, attempt=request.attempt)


def test_growing_as_one_goes_deadlocks_where_reserving_does_not():
    """Two workers of four pages, two requests of six pages that grow in turns."""
    left, held = {"w0": 4, "w1": 4}, {"a": 0, "b": 0}
    for request_id in ("a", "b") * 4:  # page by page, as the papers do
        worker = max(left, key=lambda w: left[w])
        left[worker] -= 1
        held[request_id] += 1
    assert sum(left.values()) == 0 and held == {"a": 4, "b": 4}  # neither can continue
    bench = fleet(4, 4)
    bench.submit("a", 80, 16)
    bench.submit("b", 80, 16)
    assert free(bench) == {"d0": 0, "d1": 2}  # b holds nothing
    assert bench.machine.requests["b"].decode_id is None
    end(bench, "a")
    assert bench.machine.requests["b"].kv_instance_ids == ("d0", "d1")


def test_short_requests_run_on_the_same_workers():
    """Mnemosyne 4.4: each replica batches short requests while it serves the long one."""
    bench = fleet(8, 8)
    bench.submit("long", 90, 10)
    assert free(bench) == {"d0": 4, "d1": 5}
    for name in ("short", "next"):
        bench.submit(name, 54, 10)
    assert [bench.machine.requests[r].kv_instance_ids for r in ("short", "next")] == [
        ("d1",),
        ("d0",),
    ]
    end(bench, "long")
    assert free(bench) == {"d0": 4, "d1": 4}


def test_integrity_finds_a_leak_and_a_lost_page():
    bench = fleet(4, 4)
    bench.submit("a", 80, 16)
    worker = bench.machine.cluster.instances["d1"]
    worker.shard_pages += 1
    with pytest.raises(IntegrityError, match="d1: pages of shards: kept 3, counted 2"):
        bench.machine.check_integrity()
    worker.shard_pages = worker.booked_pages = worker.holdings["a"].pages = 1
    with pytest.raises(IntegrityError, match="d1: pages of a: kept 1, counted 2"):
        bench.machine.check_integrity()


# ---- properties

rooms = st.lists(st.tuples(st.integers(0, 6), st.sampled_from([4, 16])), max_size=6).map(
    lambda given: [Room(f"w{i}", pages, size) for i, (pages, size) in enumerate(given)]
)


@given(rooms, st.integers(1, 400), st.integers(16, 80), st.integers(1, 6))
def test_it_fits_exactly_when_some_choice_of_workers_has_the_room(workers, tokens, most, limit):
    """All subsets of workers, each giving all it may: a reservation is found iff one suffices."""
    most_of = [min(most // w.page_tokens, w.free_pages) * w.page_tokens for w in workers]
    fits = any(
        sum(chosen) >= tokens
        for count in range(1, min(limit, len(workers)) + 1)
        for chosen in combinations(most_of, count)
    )
    assert (reserve(tokens, workers, most, max_workers=limit) is not None) == fits


@given(rooms, st.integers(1, 300), st.integers(16, 80))
def test_every_position_has_one_owner_and_no_worker_exceeds_its_pages(workers, tokens, most):
    found = reserve(tokens, workers, most)
    if found is None:
        return
    by_id = {worker.id: worker for worker in workers}
    assert len(set(found.worker_ids)) == len(found.worker_ids)
    for one in found.shards:
        assert 0 < one.num_tokens <= most
        assert (
            -(-one.num_tokens // by_id[one.worker_id].page_tokens)
            <= by_id[one.worker_id].free_pages
        )
    for position in range(tokens):
        owners = [s.worker_id for s in found.shards if s.start_token <= position < s.end_token]
        assert owners == [found.worker_at(position)]
    assert found.tokens == tokens
    for one in found.shards[:-1]:  # a page has one owner
        assert one.num_tokens % by_id[one.worker_id].page_tokens == 0


@given(rooms, st.integers(1, 300), st.data())
def test_growth_is_monotone_and_adds_up(workers, tokens, data):
    found = reserve(tokens, workers, 32)
    if found is None:
        return
    cuts = sorted({0, tokens, *data.draw(st.lists(st.integers(0, tokens), max_size=8))})
    joined = list(found.worker_ids[:1])
    pieces: list[Shard] = []
    for start, end in pairwise(cuts):
        before, after = found.active(start), found.active(end)
        assert after[: len(before)] == before  # no worker leaves or changes its place
        joined += found.onboarded(start, end)
        assert tuple(joined) == after
        pieces += found.growth(start, end)
    position = 0
    for piece in pieces:  # what each step adds covers all positions once, at their owners
        assert piece.start_token == position < piece.end_token
        assert found.worker_at(position) == found.worker_at(piece.end_token - 1) == piece.worker_id
        position = piece.end_token
    assert position == tokens


@given(
    pages=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    kvp=st.integers(0, 3),
    wishes=st.lists(st.integers(2, 300), max_size=12),
    random=st.randoms(use_true_random=False),
)
def test_what_is_accepted_gets_to_its_end(pages, kvp, wishes, random):
    """Requests arrive all at once and end in any order; every waiting request is placed in time."""
    bench = fleet(*pages, kvp=min(kvp, len(pages) - 1))
    could = sum(pages) * 16  # a limit of four pages each gives way
    for number, tokens in enumerate(wishes):
        bench.submit(f"r{number}", tokens - 1, 1)
        assert (f"r{number}" in bench.machine.requests) == (tokens <= could)
    while bench.machine.requests:
        placed = [r for r in bench.machine.requests.values() if r.decode_id is not None]
        end(bench, random.choice(sorted(r.id for r in placed)))
    assert list(free(bench).values()) == pages and not bench.machine.release_timeouts
