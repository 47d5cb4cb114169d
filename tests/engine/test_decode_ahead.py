"""Steps that begin before the tokens of the step before are on the host."""

from __future__ import annotations

import pytest
from hypothesis import settings

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.engine.device.decode_ahead import runs_ahead
from support.decode_bench import Bench, Churn
from support.hashing_model import SPECS, first_of, greedy, prompt_of, reference

PLAIN = [spec for spec in SPECS if not spec.needs_host]


class Ahead(Bench):
    """A bench whose batch runs ahead, and that counts the model's steps."""

    def __init__(self, **sizes):
        super().__init__(runs_ahead=True, **sizes)
        self.steps = 0
        decode = self.model.decode

        def counted(*arguments):
            self.steps += 1
            return decode(*arguments)

        self.model.decode = counted


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("length", [1, 4, 17])
def test_alone(spec, length):
    bench = Ahead()
    prompt = prompt_of(length, length)
    bench.join("a", prompt, 2, spec)
    bench.drain()
    expected = reference(prompt, 2, spec)
    assert bench.outputs["a", 0] == expected
    assert bench.reasons["a", 0] == ("stop" if expected[-1] in spec.stop_ids else "length")


def test_a_step_begins_before_the_tokens_of_the_step_before_are_returned():
    bench = Ahead()
    bench.join("a", [1, 2], 3, greedy(20))
    bench.step()
    assert (bench.steps, len(bench.outputs["a", 0])) == (2, 2)
    bench.step()
    assert (bench.steps, len(bench.outputs["a", 0])) == (3, 3)


def test_a_length_that_is_known_before_costs_no_step():
    bench = Ahead()
    bench.join("a", [1, 2], 3, greedy(7))
    bench.drain()
    assert bench.steps == 6 and bench.reasons["a", 0] == "length"


def test_the_last_token_of_a_stopped_sequence_comes_when_nothing_writes_to_its_pages():
    tokens = reference([1, 2], 3, greedy(10))
    at = next(i for i in range(2, 9) if tokens[i] not in tokens[:i])
    bench = Ahead()
    bench.join("ends", [1, 2], 3, greedy(10, stop_token_ids=(tokens[at],)))
    bench.join("runs", [4], 5, greedy(40))
    for _ in range(at):
        assert not any(out.finish_reason for out in bench.step())
    assert "ends" not in bench.batch.requests()
    written = bench.pool.storage.clone()
    outs = [out for out in bench.step() if out.request_id == "ends"]
    assert [(out.token_id, out.finish_reason) for out in outs] == [(tokens[at], "stop")]
    assert bench.outputs["ends", 0] == tokens[: at + 1]
    changed = (bench.pool.storage != written).nonzero()
    assert len(changed) == 1  # the row of the sequence that runs on


def test_pages_of_a_stopped_sequence_may_be_taken_back_at_once():
    tokens = reference([1, 2], 3, greedy(10))
    at = next(i for i in range(2, 9) if tokens[i] not in tokens[:i])
    bench = Ahead()
    bench.join("ends", [1, 2], 3, greedy(10, stop_token_ids=(tokens[at],)))
    (pages,) = [bench.batch.page_table.row(0, 3)]
    bench.join("runs", [4], 5, greedy(40))
    for _ in range(at):
        bench.step()
    assert bench.batch.remove("ends") == 0  # its last token is not out yet
    bench.pool.storage[:, pages] = 99
    bench.drain()
    assert (bench.pool.storage[:, pages] == 99).all()
    assert bench.outputs["ends", 0] == tokens[: at + 1]
    assert bench.outputs["runs", 0] == reference([4], 5, greedy(40))


def test_a_sequence_that_needs_the_host_stops_the_run_ahead_while_it_is_there():
    bench = Ahead()
    bench.join("plain", prompt_of(1, 5), 2, greedy(30))
    bench.step()
    bench.join("penalised", prompt_of(2, 5), 2, greedy(5, repetition_penalty=1.3))
    bench.drain()
    assert bench.outputs["plain", 0] == reference(prompt_of(1, 5), 2, greedy(30))
    penalised = reference(prompt_of(2, 5), 2, greedy(5, repetition_penalty=1.3))
    assert bench.outputs["penalised", 0] == penalised


def test_joins_and_leaves_do_not_change_anyone():
    bench = Ahead()
    jobs = []
    for i in range(30):
        spec = PLAIN[i % len(PLAIN)]
        jobs.append((f"r{i}", prompt_of(i, 1 + 5 * i % 23), first_of(spec, i), spec))
    waiting = list(jobs)
    while waiting or bench.batch.is_due:
        while waiting and bench.batch.size < 8:
            bench.join(*waiting.pop(0))
        bench.step()
    for name, prompt, first, spec in jobs:
        assert bench.outputs[name, 0] == reference(prompt, first, spec)


def test_a_removed_sequence_is_in_no_step_any_more():
    bench = Ahead()
    bench.join("gone", [1, 2, 3], 4, greedy(20))
    bench.join("stays", [7], 7, greedy(20))
    bench.step()
    assert bench.batch.remove("gone") == 1
    kept = bench.pool.storage.clone()
    assert bench.batch.is_due
    bench.drain()
    expected = reference([7], 7, greedy(20))
    assert bench.outputs["stays", 0] == expected
    assert len(((bench.pool.storage != kept).sum(0) > 0).nonzero()) <= len(expected)


def test_tokens_that_came_by_a_removal_are_returned_by_the_next_step():
    bench = Ahead()
    bench.join("a", [1], 1, greedy(3))
    bench.join("b", [2], 2, greedy(9))
    bench.step()
    bench.batch.remove("b")
    assert bench.batch.size == 0 or bench.batch.is_due
    bench.drain()
    assert bench.outputs["a", 0] == reference([1], 1, greedy(3))


def test_not_finite_logits_end_one_sequence_with_an_error():
    bench = Ahead()
    bench.join("good", [1], 1, greedy(6))
    bench.join("bad", [2], 2, greedy(6))
    bench.model.poisoned = {2}
    bench.drain()
    assert bench.reasons == {("good", 0): "length", ("bad", 0): "error"}
    assert bench.outputs["good", 0] == reference([1], 1, greedy(6))
    assert bench.outputs["bad", 0] == [2]


class ChurnAhead(Churn):
    """The same of a batch that runs ahead."""

    runs_ahead = True


TestChurnAhead = ChurnAhead.TestCase
TestChurnAhead.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"decode_ahead": "off"}, "cuda", False),
        ({"decode_ahead": "on"}, "cpu", True),
        ({"tensor_parallel": 2}, "cuda", False),
    ],
)
def test_an_engine_runs_ahead_where_it_gains(settings, device, expected):
    import torch

    assert runs_ahead(EngineConfig(**settings), torch.device(device)) == expected


def test_several_processes_refuse_to_run_ahead():
    import torch

    for more in ({"tensor_parallel": 2}, {"stages": 2}):
        with pytest.raises(ConfigError, match=r"engine.decode_ahead is 'on'; engine.tensor"):
            runs_ahead(EngineConfig(decode_ahead="on", **more), torch.device("cpu"))
