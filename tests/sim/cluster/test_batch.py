"""The fluid batch against a batch that counts every token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.request import Request, Shard
from millrace.sim.cluster.batch import Batch
from millrace.sim.cluster.job import Job
from support.simulation import decode_step_s, planned


def job(index: int, tokens: int, new: int) -> Job:
    request = Request(id=f"r{index}", proxy_id="x", prompt_tokens=tokens, max_new_tokens=new)
    return Job(planned(index, 0.0, tokens, new), request, 0.0)


def fluid(arrivals: list[tuple[float, int, int]]) -> dict[str, float]:
    """Returns when each (arrival, prompt, new) ends."""
    batch, done, now_s, end_s = Batch(), {}, 0.0, float("inf")
    coming = [(at_s, job(i, tokens, new)) for i, (at_s, tokens, new) in enumerate(arrivals)]
    while coming or batch.members:
        if coming and coming[0][0] <= end_s:
            now_s, new = coming.pop(0)
            batch.sync(now_s)
            batch.join(new, now_s)
        else:
            now_s = end_s
            batch.sync_to_end(now_s)
            done |= {sequence.job.id: now_s for sequence in batch.leave_ended()}
        end_s = float("inf")
        if batch.members:
            end_s, _ = batch.plan(now_s, lambda b, context: decode_step_s(len(b), context))
    return done


def by_token(arrivals: list[tuple[float, int, int]]) -> dict[str, float]:
    """Returns the same, step by step: sequences present when a step begins take part in it."""
    coming = [
        [at_s, f"r{i}", tokens + 1, new - 1] for i, (at_s, tokens, new) in enumerate(arrivals)
    ]
    batch, done, now_s = [], {}, 0.0
    while coming or batch:
        if not batch:
            now_s = max(now_s, coming[0][0])
        while coming and coming[0][0] <= now_s + 1e-12:
            batch.append(coming.pop(0))
        now_s += decode_step_s(len(batch), sum(context for _, _, context, _ in batch))
        for sequence in batch:
            sequence[2] += 1
            sequence[3] -= 1
        done |= {sequence[1]: now_s for sequence in batch if sequence[3] == 0}
        batch = [sequence for sequence in batch if sequence[3]]
    return done


def test_one_sequence_takes_its_steps():
    # 9 steps over contexts 101..109; the fluid takes the mean of a line through both ends.
    expected_s = sum(decode_step_s(1, 101 + i) for i in range(9))
    assert fluid([(0.0, 100, 10)])["r0"] == pytest.approx(expected_s, rel=1e-4)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0, 0.2), st.integers(1, 5000), st.integers(2, 200)),
        min_size=1,
        max_size=12,
    )
)
def test_requests_end_when_counting_every_token_says(arrivals):
    arrivals.sort()
    exact = by_token(arrivals)
    longest_s = decode_step_s(len(arrivals), sum(tokens + new for _, tokens, new in arrivals))
    for request_id, end_s in fluid(arrivals).items():
        # Joins happen at a step's end there, and in its middle here: a step each way, per joiner.
        assert end_s == pytest.approx(exact[request_id], abs=2 * longest_s, rel=0.02)


def test_a_long_stretch_is_cut_and_stays_exact():
    expected_s = sum(decode_step_s(1, 11 + i) for i in range(4999))
    assert fluid([(0.0, 10, 5000)])["r0"] == pytest.approx(expected_s, rel=1e-3)


def spread(index: int, tokens: int, new: int, *shards: tuple[str, int]) -> Job:
    """Spreads a context over workers with so many tokens each, the batch's own instance first."""
    made, start, found = job(index, tokens, new), 0, []
    for worker_id, count in shards:
        found.append(Shard(worker_id=worker_id, start_token=start, end_token=start + count))
        start += count
    made.placed(1, tuple(found))
    return made


def test_context_and_growth_are_back_at_zero():
    batch = Batch()
    batch.join(job(0, 100, 10), 0.0)
    batch.join(spread(1, 300, 5, ("d0", 120), ("k0", 120), ("k1", 65)), 0.0)
    assert batch.context == pytest.approx(101 + 120)
    assert (batch.growth, batch.degree) == (1.0, 3)
    batch.leave("r0")
    assert batch.context == pytest.approx(120)
    batch.leave("r1")
    assert (batch.context, batch.growth, batch.steps, batch.degree) == (0.0, 0.0, 0.0, 1)


def test_a_step_waits_for_the_worker_that_has_most():
    batch = Batch()
    batch.join(spread(0, 300, 5, ("d0", 100), ("k0", 205)), 0.0)
    assert batch.context == pytest.approx(201)
    batch.join(spread(1, 300, 5, ("d0", 200), ("k0", 105)), 0.0)
    assert batch.context == pytest.approx(201 + 101)  # k0 has of both
    batch.join(job(2, 50, 5), 0.0)
    assert batch.context == pytest.approx(100 + 200 + 51)  # now the KV owner has more


def test_workers_take_part_once_an_answer_reaches_their_shards():
    batch, found = Batch(), []
    batch.join(spread(0, 100, 201, ("d0", 150), ("k0", 100), ("k1", 51)), 0.0)
    for steps in (0, 50, 100):
        batch.advance(steps)
        found.append((batch.degree, batch.context))
    assert found == [(1, 101), (2, 150), (3, 150)]
    assert batch.leave("r0").computed == 250


def test_who_joins_in_the_middle_of_a_step_takes_part_from_the_next_one_on():
    batch = Batch()
    batch.join(job(0, 100, 11), 0.0)
    batch.plan(0.0, lambda b, context: 0.010)
    batch.sync(0.014)
    batch.join(job(1, 100, 3), 0.014)
    end_s, _ = batch.plan(0.014, lambda b, context: 0.010)
    assert end_s == pytest.approx(0.040)  # the steps that begin at 20 and 30 ms


def test_cut_ends_the_step_under_way():
    batch = Batch()
    batch.join(job(0, 100, 100), 0.0)
    batch.plan(0.0, lambda b, context: 0.010)
    assert batch.cut(0.034) == pytest.approx(0.040)
    batch.sync_to_end(0.040)
    assert batch.steps == pytest.approx(4.0)
