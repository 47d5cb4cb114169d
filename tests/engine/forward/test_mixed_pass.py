"""Passes of decodes and chunks together give the results of separate passes."""

from __future__ import annotations

import random

import pytest
import torch

from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.parallel.rank_group import RankGroup
from support.deadlines import HANG_S
from support.parallel import open_runner, split_folder
from support.tiny_engine import Request, decode, greedy, in_company, make_runner, mixed, prefill
from support.tiny_models import model_folder, prompt

FAMILIES = ("llama", "llama3-rope-tied", "mistral-window", "qwen3-layer-types", "mixtral")


def started(runner: ModelRunner, lengths: tuple[int, ...], room: int = 12) -> list[Request]:
    requests = [Request(runner, prompt(n, seed=n), room=room) for n in lengths]
    for request in requests:
        request.tokens.append(int(prefill(runner, request).argmax()))
    return requests


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mixed_pass_gives_what_a_step_and_a_prefill_give(name: str) -> None:
    alone, runner = (make_runner(model_folder(name), num_pages=160) for _ in range(2))
    runs = [
        (run, started(run, (40, 3, 17)), Request(run, prompt(90, seed=9)))
        for run in (alone, runner)
    ]
    (_, separate, whole), (_, together, chunked) = runs
    expected = decode(alone, separate)
    last = prefill(alone, whole, (33, 70))

    tasks = [chunked.task(0, 33, want_logits=False), chunked.task(33, 70, want_logits=False)]
    for task in tasks:
        mixed(runner, [], [task])
    final, other = chunked.task(70, 90), Request(runner, prompt(8, seed=2))
    found = mixed(runner, together, [final, other.task(0, 5, want_logits=False)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert final.logits is not None
    torch.testing.assert_close(final.logits, last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "mixtral"])
def test_random_batches_give_the_tokens_of_separate_ones(name: str) -> None:
    """Prompts come at random and are cut at random, beside any decodes."""
    chance = random.Random(name)
    prompts = [prompt(chance.randint(1, 120), seed=n) for n in range(9)]
    alone = make_runner(model_folder(name), num_pages=200)
    expected = [greedy(alone, [Request(alone, ids, room=8)], 6)[0] for ids in prompts]

    runner = make_runner(model_folder(name), num_pages=200)
    requests = [Request(runner, ids, room=8) for ids in prompts]
    in_company(runner, requests, 6, chance)
    for ids, request, answer in zip(prompts, requests, expected, strict=True):
        assert request.tokens[len(ids) :] == answer


def test_prompt_logprobs_are_of_all_rows_of_those_that_ask() -> None:
    runner = make_runner(model_folder("llama"), num_pages=100)
    ids = prompt(30)
    whole = Request(runner, ids).task(0, 30)
    whole.want_hidden = True
    for _ in runner.prefill_batch([whole]):
        pass
    decodes = started(runner, (5, 9))
    asking, plain = Request(runner, ids).task(0, 30), Request(runner, prompt(7)).task(0, 7)
    asking.want_hidden = True
    mixed(runner, decodes, [plain, asking])
    assert asking.hidden is not None and whole.hidden is not None and plain.hidden is None
    torch.testing.assert_close(asking.hidden, whole.hidden, rtol=1e-4, atol=1e-4)


def test_chunks_that_want_nothing_beside_no_decode_leave_their_kv_alone() -> None:
    runner = make_runner(model_folder("llama"))
    one, two = (Request(runner, prompt(20)) for _ in range(2))
    assert mixed(runner, [], [one.task(0, 20, want_logits=False)]).shape[0] == 0
    prefill(runner, two)
    kv_one, kv_two = (runner.pool.storage[:, request.pages[0]] for request in (one, two))
    assert torch.equal(kv_one, kv_two)


def test_a_chunk_without_tokens_or_pages_is_refused() -> None:
    runner = make_runner(model_folder("llama"))
    request = Request(runner, prompt(20))
    with pytest.raises(ValueError, match="at least one token"):
        none = PrefillTask(token_ids=request.task(0, 5).token_ids[:0], history_tokens=5, pages=[])
        mixed(runner, [], [none])
    request.pages.pop()
    with pytest.raises(ValueError, match="can't hold 20"):
        mixed(runner, [], [request.task(0, 20)])


def test_ranks_do_what_one_does() -> None:
    group = RankGroup(2, timeout_s=2 * HANG_S)
    try:
        alone = make_runner(split_folder("mixtral"), num_pages=64)
        split = open_runner(group, split_folder("mixtral"))
        answers = []
        for run in (alone, split):
            decodes = started(run, (20, 33))
            chunk = Request(run, prompt(40, seed=3))
            found = [mixed(run, decodes, [chunk.task(0, 25, want_logits=False)])]
            for request, row in zip(decodes, found[0], strict=True):
                request.tokens.append(int(row.argmax()))
            found.append(decode(run, decodes))
            last = chunk.task(25, 40)
            found.append(mixed(run, [], [last]))
            assert last.logits is not None
            answers.append([*found[:2], last.logits])
        for one, two in zip(*answers, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)
    finally:
        group.close()
