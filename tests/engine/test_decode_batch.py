"""The continuous batch over a tiny deterministic model whose tokens depend on all of its KV."""

from __future__ import annotations

import pytest
from hypothesis import settings

from millrace.core.errors import CapacityError, IntegrityError
from millrace.engine.sampling.sampler import SamplingSpec
from support.decode_bench import Bench, Churn
from support.hashing_model import (
    SPECS,
    first_of,
    greedy,
    prompt_of,
    reference,
)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
def test_alone(spec, length):
    bench = Bench()
    prompt = prompt_of(length, length)
    bench.join("a", prompt, 2, spec)
    bench.drain()
    expected = reference(prompt, 2, spec)
    assert bench.outputs["a", 0] == expected
    assert bench.reasons["a", 0] == ("stop" if expected[-1] in spec.stop_ids else "length")


def test_joins_and_leaves_do_not_change_anyone():
    bench = Bench()
    jobs = []
    for i in range(24):
        spec = SPECS[i % len(SPECS)]
        jobs.append((f"r{i}", prompt_of(i, 1 + 5 * i % 23), first_of(spec, i), spec))
    waiting = list(jobs)
    while waiting or bench.batch.size:
        while waiting and bench.batch.size < 8:
            bench.join(*waiting.pop(0))
        bench.step()
    for name, prompt, first, spec in jobs:
        assert bench.outputs[name, 0] == reference(prompt, first, spec)


def test_a_step_reports_every_sequence_and_how_it_ended():
    bench = Bench()
    stop = reference([1, 2], 3, greedy(10))[2]  # the second token of its second step
    bench.join("ends", [1, 2], 3, greedy(10, stop_token_ids=(stop,), logprobs=2))
    bench.join("runs", [4], 5, greedy(3))
    outs = {o.request_id: o for o in bench.step()}
    assert set(outs) == {"ends", "runs"}
    assert len(outs["ends"].logprobs.top) == 2
    assert outs["ends"].logprobs.chosen[0] == outs["ends"].token_id
    assert outs["runs"].logprobs is None
    outs = {o.request_id: o for o in bench.step()}
    assert (outs["ends"].finish_reason, outs["ends"].stop_token_id) == ("stop", stop)
    assert (outs["runs"].finish_reason, outs["runs"].stop_token_id) == ("length", -1)
    assert bench.batch.size == 0
    assert bench.batch.step() == []


def test_choices_share_the_prompts_pages_and_copy_the_last():
    spec = SamplingSpec(max_tokens=12, temperature=1.0, seed=9, n=3)
    prompt = prompt_of(1, 10)  # two full pages and a half
    bench = Bench()
    shared = bench.pool.allocate(2)
    own = [bench.pool.allocate(4) for _ in range(3)]
    bench.model.prefill(prompt, shared + own[0])
    for choice in range(3):
        if choice:
            bench.pool.share(shared)
            bench.pool.copy_page(own[0][0], own[choice][0])
        bench.add("n", choice, shared + own[choice], prompt, choice, spec)
    bench.batch.check_integrity()
    bench.drain()
    outputs = [bench.outputs["n", choice] for choice in range(3)]
    assert outputs == [reference(prompt, choice, spec, choice) for choice in range(3)]
    assert len({tuple(o[1:]) for o in outputs}) == 3
    for choice in range(3):
        bench.pool.free(shared + own[choice])
    bench.pool.check_integrity(expected_used=0)


def test_remove_takes_all_choices_and_leaves_the_others():
    bench = Bench()
    for choice in range(3):
        bench.join("gone", [1, 2, 3], choice, greedy(20), choice)
    bench.join("stays", [7], 7, greedy(20))
    bench.step()
    assert bench.batch.remove("gone") == 3
    assert bench.batch.remove("gone") == 0
    assert bench.batch.remove("never was") == 0
    bench.batch.check_integrity()
    assert bench.batch.size == 1
    bench.drain()
    assert bench.outputs["stays", 0] == reference([7], 7, greedy(20))


def test_not_finite_logits_end_one_sequence_with_an_error():
    bench = Bench()
    bench.join("good", [1], 1, greedy(6))
    bench.join("bad", [2], 2, greedy(6))
    bench.model.poisoned = {2}
    expected = reference([1], 1, greedy(6))
    assert 2 not in expected[:-1]
    outs = {o.request_id: o for o in bench.step()}
    assert outs["bad"].finish_reason == "error"
    assert outs["bad"].token_id == -1
    assert "not finite" in outs["bad"].error
    bench.drain()
    assert bench.outputs["good", 0] == expected
    assert bench.outputs["bad", 0] == [2]


def test_what_add_refuses():
    bench = Bench(max_batch=2)
    bench.join("a", [1], 1, greedy(6))
    with pytest.raises(ValueError, match="already"):
        bench.join("a", [1], 1, greedy(6))
    with pytest.raises(ValueError, match="finished by its first token"):
        bench.join("b", [1], 1, greedy(1))
    with pytest.raises(ValueError, match="finished by its first token"):
        bench.join("b", [1], 1, greedy(5, stop_token_ids=(1,)))
    with pytest.raises(ValueError, match="room for 9 tokens; its pages hold 8"):
        bench.add("b", 0, [0, 1], [1] * 8, 1, greedy(6))
    bench.join("b", [1], 1, greedy(6))
    with pytest.raises(CapacityError, match="full"):
        bench.join("c", [1], 1, greedy(6))
    bench.batch.check_integrity()
    assert bench.batch.size == 2


def test_integrity_finds_a_page_with_two_writers():
    bench = Bench()
    bench.add("a", 0, [0, 1, 2], [1] * 4, 1, greedy(8))
    bench.add("b", 0, [0, 3, 4], [1] * 4, 1, greedy(8))  # page 0 is full of prompt: shared
    bench.batch.check_integrity()
    bench.add("c", 0, [5, 6, 4], [1] * 4, 1, greedy(8))
    with pytest.raises(IntegrityError, match="page 4"):
        bench.batch.check_integrity()


def test_integrity_finds_a_damaged_page_table():
    bench = Bench()
    bench.join("a", [1], 1, greedy(8))
    bench.batch.page_table.put(0, [page + 1 for page in bench.batch.page_table.row(0, 2)])
    with pytest.raises(IntegrityError, match="page table"):
        bench.batch.check_integrity()


def test_growth_by_the_page():
    bench = Bench(num_pages=8)
    bench.join("a", prompt_of(1, 6), 2, greedy(20), room=1)
    assert bench.batch.lacking() == []
    assert bench.batch.lacking(2) == []
    assert bench.batch.lacking(3) == [("a", 0)]
    bench.drain()
    assert bench.outputs["a", 0] == reference(prompt_of(1, 6), 2, greedy(20))
    assert bench.pool.used_pages == 7  # 6 tokens of prompt and 19 fed tokens


def test_a_sequence_wants_no_pages_beyond_its_end():
    bench = Bench()
    bench.join("a", prompt_of(1, 6), 2, greedy(3), room=2)  # the third one is never fed
    assert bench.batch.lacking(100) == []


@pytest.mark.parametrize("spec", SPECS)
def test_a_paused_sequence_goes_on_as_if_it_never_had_been(spec):
    bench = Bench()
    prompt = prompt_of(3, 9)
    bench.join("a", prompt, 2, spec)
    bench.join("b", prompt, 1, greedy(40))
    for _ in range(30):
        bench.step()
        paused = bench.batch.pause("a")
        bench.batch.check_integrity()
        bench.step()
        for one in paused:
            bench.batch.resume(bench.swap(one))
    assert bench.outputs["a", 0] == reference(prompt, 2, spec)


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=15, stateful_step_count=25)
