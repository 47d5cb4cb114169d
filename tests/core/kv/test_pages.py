"""The scheduler reserves exactly the pages that groups take, and they always fit."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.kv.pages import pages_of_plan, pages_of_share
from millrace.core.kv.sp_layout import RING_BUFFERS, layout, pages_taken
from millrace.core.request import Chunk
from millrace.core.scheduler.effects import Refuse, RunPrefill
from support.core_events import Bench, groups_of, instance, of
from support.prefill_fleet import scripted

tokens = st.integers(1, 400)
degrees = st.integers(1, 9)
page_sizes = st.sampled_from([1, 4, 16])
layers = st.sampled_from([0, 1, 2, 5, 32])


@given(tokens, st.integers(0, 400), degrees, page_sizes, layers)
def test_the_largest_share_of_one_chunk(count, history, sp, page_tokens, kv_layers):
    chunk = Chunk(
        index=0,
        start_token=history,
        num_tokens=count,
        instance_ids=tuple(f"p{i}" for i in range(sp)),
    )
    taken = pages_taken([chunk], page_tokens, kv_layers)
    assert pages_of_plan([chunk], page_tokens, kv_layers) == taken
    assert pages_of_share(count, history, sp, page_tokens, kv_layers) == max(taken.values())


@given(st.lists(st.tuples(tokens, degrees), min_size=1, max_size=4), st.integers(0, 100), layers)
def test_a_plan_takes_what_its_members_lay_out(parts, history, kv_layers):
    chunks, start, sp = [], history, 0
    for index, (count, more) in enumerate(parts):
        sp = min(sp + more, 9) if index else more
        ids = tuple(f"p{i}" for i in range(sp))
        chunks.append(Chunk(index=index, start_token=start, num_tokens=count, instance_ids=ids))
        start += count
    laid = layout(chunks, 16, 64)
    buffers = RING_BUFFERS * laid.buffer_pages(kv_layers) if kv_layers else 0
    wanted = {name: pages + buffers for name, pages in laid.pages.items()}
    assert pages_of_plan(chunks, 16, kv_layers) == wanted


# ---- what fits


def bench(count: int, pages: int, kv_layers: int, planner: str = "cdsp", sp=(1, 2, 4)) -> Bench:
    fleet = [
        instance(
            f"p{i}",
            pages=pages,
            latency=groups_of(*sp),
            node="n",
            context=100_000,
            kv_layers=kv_layers,
        )
        for i in range(count)
    ]
    config = SchedulerConfig(planner=planner, improvement_rate=0.0, fixed_sp=sp[-1])
    return Bench(*fleet, instance("d0", pages=100_000, context=100_000), config=config)


def test_buffers_count_among_the_pages_of_a_group() -> None:
    one = bench(2, 16, 4, planner="fixed_sp", sp=(1, 2))
    one.submit("a", 320)  # 10 pages of each, and two buffers of 10 / 4
    (pool,) = one.machine.cluster.pools.values()
    assert [p.used_pages for p in pool.prefill.values()] == [16, 16]
    one = bench(2, 15, 4, planner="fixed_sp", sp=(1, 2))
    assert [e.code for e in of(Refuse, one.submit("a", 320))] == ["too_large"]


def test_two_that_need_more_than_one_leave_it_to_one() -> None:
    """With one layer a page, each of two has 5 + 2 * 5 pages where one alone has 10."""
    one = bench(2, 10, 1, planner="esp", sp=(1, 2))
    assert len(of(RunPrefill, one.submit("a", 160))) == 1


def test_a_plan_that_no_member_could_take_in_becomes_one_chunk() -> None:
    one = scripted(bench(4, 12, 32), {400: [(250, (0,)), (150, (0, 1, 2, 3))]})
    found = of(RunPrefill, one.submit("a", 400))  # 16 pages of p0, which has 12
    assert [len(e.chunks) for e in found] == [1] * 4


def test_instances_whose_pages_differ_form_no_groups() -> None:
    one = bench(1, 100, 4, planner="esp", sp=(1, 2))
    one.step(instance("p1", pages=100, latency=groups_of(1, 2), node="n", kv_layers=8))
    assert len(of(RunPrefill, one.submit("a", 300))) == 1


@pytest.mark.parametrize("planner", ["cdsp", "esp", "single_chunk", "fixed_sp", "least_queue"])
@pytest.mark.parametrize("kv_layers", [0, 1, 4])
def test_on_an_idle_pool_a_request_is_sent_or_refused(planner, kv_layers) -> None:
    """No request is accepted that would wait for ever, and members never lack a plan's pages."""
    draw = random.Random(kv_layers)
    for _ in range(60):
        pages = draw.randint(1, 40)
        one = bench(draw.randint(1, 6), pages, kv_layers, planner)
        found = one.submit("a", draw.randint(1, 64 * pages))
        assert of(RunPrefill, found) or [e.code for e in of(Refuse, found)] == ["too_large"]
