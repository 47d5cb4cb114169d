"""A tensor-parallel group computes the same as one rank, stopped and resumed anywhere."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Generator, Iterator
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

from millrace.engine.execution_pool import ChunkTask, ExecutionPool, StopPoint
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.passes import Boundary
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.forward.stage_passes import StagePasses
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.loader import load_model
from millrace.engine.parallel.rank_group import RankGroup
from millrace.transfer.transport.layout import Side, at_layer, layer_runs
from millrace.transfer.transport.regions import Memory, copy_on_host
from support.deadlines import HANG_S
from support.parallel import SPLIT_FOUR_WAYS, open_runner, split_folder, storm
from support.tiny_engine import Request, decode, greedy, make_pool, make_runner, prefill
from support.tiny_models import prompt


@pytest.fixture(scope="module", params=[2, 4])
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    ranks = RankGroup(request.param, timeout_s=2 * HANG_S)
    yield ranks
    ranks.close()
    assert not any(map(psutil.pid_exists, ranks.pids))


@pytest.mark.parametrize("name", SPLIT_FOUR_WAYS)
def test_greedy_tokens_are_those_of_one_rank(group: RankGroup, name: str) -> None:
    """Prefill with history and in chunks, then decode steps of several sequences."""
    alone = make_runner(split_folder(name))
    runner = open_runner(group, split_folder(name))
    answers = []
    for run in (alone, runner):
        chunked = Request(run, prompt(60), room=8)
        first = prefill(run, chunked, (24, 25))
        requests = [Request(run, prompt(n, seed=n), room=8) for n in (33, 7, 18)]
        answers.append((first, greedy(run, requests, 5)))
    (one, tokens), (split, split_tokens) = answers
    torch.testing.assert_close(split, one, rtol=1e-4, atol=1e-4)
    assert split_tokens == tokens


def test_random_weights_are_those_of_one_rank(group: RankGroup) -> None:
    folder = split_folder("mixtral")
    whole = load_model(folder, device="cpu", load_format="dummy")
    alone = ModelRunner(StagePasses(whole, make_pool(whole)))
    runner = open_runner(group, folder, load_format="dummy")
    assert runner.model.hash == whole.hash
    one, split = (prefill(run, Request(run, prompt(20))) for run in (alone, runner))
    torch.testing.assert_close(split, one, rtol=1e-4, atol=1e-4)


def test_bfloat16_agrees_within_its_rounding(group: RankGroup) -> None:
    folder = split_folder("qwen3-layer-types")
    alone = make_runner(folder, dtype="bfloat16")
    runner = open_runner(group, folder, dtype="bfloat16")
    one, split = (prefill(run, Request(run, prompt(50)), (20,)) for run in (alone, runner))
    assert (one - split).abs().max() < 0.05 * one.abs().max()


@pytest.mark.parametrize("name", ["llama3-rope-tied", "qwen2-yarn-window"])
def test_pools_of_all_ranks_send_the_kv_of_one(group: RankGroup, name: str) -> None:
    """As the transfer lays it out, into a pool of another page size that holds all heads.

    Where ranks are more than KV heads, several share a pool.
    """
    alone = make_runner(split_folder(name), page_tokens=8)
    runner = open_runner(group, split_folder(name))
    ours, theirs = Request(alone, prompt(53)), Request(runner, prompt(53))
    prefill(alone, ours)
    prefill(runner, theirs)
    received = KvPool(alone.pool.layout)
    target = Side.of(received.layout, ours.pages, 53)
    for number, storage in enumerate(runner.storage):
        heads = runner.pool.layout.head_count
        layout = replace(runner.pool.layout, head_start=number * heads)
        runs = layer_runs(Side.of(layout, theirs.pages, 53), target, 0, 53)
        memory = (Memory.of_tensor(storage), Memory.of_tensor(received.storage))
        for layer in range(layout.num_layers):
            copy_on_host(*memory, at_layer(runs, layout, received.layout, layer))
    torch.testing.assert_close(received.storage, alone.pool.storage, rtol=1e-4, atol=1e-4)


def test_prompt_logprobs_and_copied_pages_come_from_all_ranks(group: RankGroup) -> None:
    folder = split_folder("qwen3-layer-types")
    alone, runner = make_runner(folder), open_runner(group, folder)
    logits, hidden = [], []
    for run in (alone, runner):
        request = Request(run, prompt(30))
        task = request.task(0, 30, want_logits=False)
        task.want_hidden = True
        for _ in run.prefill_batch([task]):
            pass
        assert task.hidden is not None
        hidden.append(task.hidden)
        logits.append(run.project(task.hidden))
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    source, target = request.pages[0], runner.pool.allocate(1)[0]
    runner.copy_page(source, target)
    prefill(runner, Request(runner, prompt(5)))  # once it runs, all have copied
    assert runner.storage[:, :, source].any(dim=(1, 2, 3, 4, 5)).all()
    assert torch.equal(runner.storage[:, :, target], runner.storage[:, :, source])


def test_boundaries_are_those_of_one_rank_however_the_pass_is_left(group: RankGroup) -> None:
    folder = split_folder("qwen3-moe-mixed")
    alone, runner = make_runner(folder), open_runner(group, folder)
    for want_logits in (True, False):
        task = Request(alone, prompt(20)).task(0, 20, want_logits=want_logits)
        wanted = list(alone.prefill_batch([task]))
        seen: list[Boundary] = []
        task = Request(runner, prompt(20)).task(0, 20, want_logits=want_logits)
        for boundary in runner.prefill_batch([task]):
            seen.append(boundary)
            runner.processes.rest()
        assert seen == wanted


@pytest.mark.parametrize("want_logits", [True, False])
def test_a_layers_kv_is_in_all_pools_once_attn_is_yielded(
    group: RankGroup, want_logits: bool
) -> None:
    runner = open_runner(group, split_folder("mixtral"))
    request = Request(runner, prompt(40))
    seen = []
    for boundary in runner.prefill_batch([request.task(0, 40, want_logits=want_logits)]):
        if boundary.operator == "attn":
            kv = runner.storage[:, boundary.layer, request.pages]  # a copy
            seen.append((boundary.layer, kv))
    assert len(seen) == 3
    for layer, kv in seen:
        assert kv.any(dim=(1, 2, 3, 4, 5)).all()
        assert torch.equal(kv, runner.storage[:, layer, request.pages])


def test_a_closed_pass_leaves_the_pool_usable(group: RankGroup) -> None:
    folder = split_folder("mistral-window")
    runner = open_runner(group, folder, num_pages=8)
    expected = prefill(runner, Request(runner, prompt(100)))
    runner = open_runner(group, folder, num_pages=8)
    for operators in (1, 4, 7, 17):
        request = Request(runner, prompt(100, seed=operators))
        steps = runner.prefill_batch([request.task(0, 100)])
        for _ in range(operators):
            next(steps)
        steps.close()
        runner.pool.free(request.pages)
        runner.pool.check_integrity(expected_used=0)
    assert torch.equal(prefill(runner, Request(runner, prompt(100))), expected)


def test_senseless_tasks_are_refused_and_the_group_goes_on(group: RankGroup) -> None:
    runner = open_runner(group, split_folder("mixtral"))
    with pytest.raises(ValueError, match="can't hold 17"):
        runner.prefill_batch([PrefillTask(token_ids=torch.arange(17), history_tokens=0, pages=[0])])
    assert prefill(runner, Request(runner, prompt(17))).isfinite().all()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["mistral-window", "qwen3-moe-mixed"])
def test_random_preemptions_change_nothing(group: RankGroup, name: str) -> None:
    runner = open_runner(group, split_folder(name), num_pages=128)
    storm(runner, 4, seed=random.randrange(1 << 30), lengths=(12, 70))


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_long_storm_never_deadlocks(group: RankGroup) -> None:
    runner = open_runner(group, split_folder("qwen3-moe-mixed"), num_pages=1100)
    storm(runner, 80, seed=random.randrange(1 << 30), lengths=(12, 200))


def test_an_execution_pool_preempts_all_ranks(group: RankGroup) -> None:
    """The pool leaves and resumes passes as orders come; their results are undisturbed ones."""
    runner = open_runner(group, split_folder("qwen3-moe-mixed"), num_pages=128)
    requests = {str(i): Request(runner, prompt(40 + i, seed=i)) for i in range(4)}
    expected = {name: prefill(runner, request) for name, request in requests.items()}
    tasks = {name: r.task(0, len(r.tokens)) for name, r in requests.items()}
    pool = ExecutionPool(torch.device("cpu"), most_held=4)
    pool.set_granularity(StopPoint.OPERATOR)
    ended: queue.Queue[BaseException | None] = queue.Queue()
    left: list[str] = []

    class Chunk(ChunkTask):
        def suspended(self) -> None:
            left.append(self.name)

        def ended(self, error: Exception | None) -> None:
            ended.put(error)

    def steps(name: str) -> Generator[StopPoint]:
        for _ in runner.prefill_batch([tasks[name]]):
            yield StopPoint.OPERATOR
        yield StopPoint.PASS

    for name in tasks:
        pool.submit(Chunk(name, steps(name)))
    rng = random.Random(5)
    while ended.qsize() < len(tasks):
        pool.order(rng.sample(list(tasks), len(tasks)))
        time.sleep(0.005)
    pool.close()
    assert [ended.get() for _ in tasks] == [None] * len(tasks) and left
    for name, task in tasks.items():
        assert task.logits is not None and torch.equal(task.logits, expected[name])


def test_decode_steps_with_changing_tables(group: RankGroup) -> None:
    """The table is sent when it changes, and only then: it must never be an old table."""
    folder = split_folder("llama-mha-sharded")
    alone, runner = make_runner(folder), open_runner(group, folder)
    rng = np.random.default_rng(3)
    runs = []
    for run in (alone, runner):
        requests = [Request(run, prompt(n, seed=n), room=20) for n in (30, 14, 22)]
        for request in requests:
            prefill(run, request)
        runs.append(requests)
    for _ in range(8):
        order = rng.permutation(3)[: rng.integers(1, 4)]
        logits = []
        for run, requests in zip((alone, runner), runs, strict=True):
            chosen = [requests[i] for i in order]
            for request in chosen:
                request.tokens.append(int(11 + len(request.tokens)))
            logits.append(decode(run, chosen))
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
