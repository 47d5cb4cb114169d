"""Tetris section 5.2, sentence by sentence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.kv.pages import pages_of_request
from millrace.core.scheduler.effects import Place
from millrace.core.scheduler.fleet.freeness import freeness, freest
from support.core_events import Bench, instance, of


@dataclass
class Room:
    id: str
    free_pages: int
    virtual_pages: int = 0
    batch_size: int = 1
    page_tokens: int = 16

    @property
    def freeness(self) -> float:
        tokens = self.page_tokens
        return freeness(self.free_pages * tokens, self.virtual_pages * tokens, self.batch_size)


def test_freeness_is_available_slots_over_active_batch_size():
    """ "the ratio between available slots (excluding virtual usage) and the active batch size" """
    assert freeness(1000, 200, 4) == 200.0


def test_an_empty_batch_counts_as_one():
    """The paper divides by zero here; an idle instance offers all that it has."""
    assert freeness(1000, 200, 0) == 800.0


def test_a_new_request_goes_to_the_instance_with_the_highest_freeness_rate():
    """ "each new request is routed to the instance with the highest freeness rate" """
    busy, calm = Room("d0", free_pages=100, batch_size=10), Room("d1", 50, batch_size=2)
    assert freest([busy, calm]) is calm


def test_requests_with_ongoing_transfer_are_virtual_usage():
    """ "slots of requests with ongoing cache transfer is treated as virtual usage" """
    crowded, other = Room("d0", free_pages=100, virtual_pages=90), Room("d1", free_pages=20)
    assert freest([crowded, other]) is other


def test_slots_are_tokens_so_page_sizes_compare():
    large = instance("d1", pages=60, page_tokens=32)
    bench = Bench(instance("p0"), instance("d0", pages=100, page_tokens=16), large)
    assert of(Place, bench.submit("a"))[0].decode_id == "d1"


def test_equals_are_told_apart_by_id_and_nothing_comes_of_nothing():
    assert freest([Room("d1", 10), Room("d0", 10)]).id == "d0"
    assert freest([]) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2), st.booleans()), max_size=12))
def test_of_those_that_are_able_the_freest_is_what_a_plain_scan_finds(rooms):
    able = {f"d{number}": yes for number, (_, _, yes) in enumerate(rooms)}
    all_rooms = [
        Room(f"d{number}", free_pages=pages, batch_size=batch)
        for number, (pages, batch, _) in enumerate(rooms)
    ]
    open_to = [room for room in all_rooms if able[room.id]]
    expected = min(open_to, key=lambda room: (-room.freeness, room.id), default=None)
    assert freest(reversed(all_rooms), lambda room: able[room.id]) is expected


def test_the_machine_counts_a_placed_request_as_virtual_until_it_decodes():
    config = SchedulerConfig(tasks_ahead=8)
    bench = Bench(instance("p0"), instance("d0"), instance("d1"), config=config)
    first = of(Place, bench.submit("a"))[0].decode_id
    second = of(Place, bench.submit("b"))[0].decode_id
    assert {first, second} == {"d0", "d1"}  # a's transfer under way makes its instance less free
    decode = bench.machine.cluster.instances[first]
    assert (decode.virtual_pages, decode.free_pages, decode.batch_size) == (8, 100, 0)
    bench.computed("p0", "a")
    bench.decoding(first, "a")
    assert (decode.virtual_pages, decode.free_pages, decode.batch_size) == (0, 92, 1)


def test_the_machine_prefers_the_smaller_batch_at_equal_memory():
    bench = Bench(
        instance("p0", pages=1000), instance("d0"), config=SchedulerConfig(tasks_ahead=64)
    )
    bench.submit("two", 128, 16, choices=2)  # 8 shared pages, 1 for each of two: a batch of 2
    bench.computed("p0", "two")
    bench.decoding("d0", "two")
    bench.step(instance("d1", pages=80))
    assert of(Place, bench.submit("next"))[0].decode_id == "d1"  # 80 / 1 against 90 / 2


# ---- the pages of a request from placement to end


@pytest.mark.parametrize(
    "prompt, new, choices, page, pages",
    [
        (1, 1, 1, 16, 1),
        (16, 16, 1, 16, 2),
        (15, 2, 1, 16, 2),
        (100, 28, 1, 16, 8),
        (100, 28, 3, 16, 6 + 3 * 2),  # the page that holds tokens 96..99 is copied
        (96, 32, 3, 16, 6 + 3 * 2),  # nothing to copy: only growth
        (7, 9, 4, 1, 7 + 4 * 9),
    ],
)
def test_pages_of_request(prompt, new, choices, page, pages):
    assert pages_of_request(prompt, new, choices, page) == pages


@given(st.integers(1, 500), st.integers(1, 200), st.integers(1, 8), st.integers(1, 64))
def test_pages_of_request_is_what_copy_on_write_takes(prompt, new, choices, page):
    """Writes every token of every choice into pages, sharing and copying as decode does."""
    table = list(range(-(-prompt // page)))
    used, users = set(table), dict.fromkeys(table, choices)
    for _ in range(choices):
        mine = list(table)
        for position in range(prompt, prompt + new):
            index = position // page
            if index == len(mine):
                mine.append(len(used))
                used.add(mine[-1])
                users[mine[-1]] = 1
            elif users[mine[index]] > 1:
                users[mine[index]] -= 1
                mine[index] = len(used)
                used.add(mine[index])
                users[mine[index]] = 1
    assert len(used) == pages_of_request(prompt, new, choices, page)
