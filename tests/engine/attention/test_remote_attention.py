"""A KV owner and KVP workers compute the same as one instance."""

from __future__ import annotations

import random

import pytest
from torch.testing import assert_close

from millrace.engine.decode_batch import DecodeBatch, TokenOut
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.stage_passes import StagePasses
from millrace.engine.model.loader import load_model
from millrace.engine.sampling.sampler import Sampler
from support.kvp_world import Long, World, prefill_long, random_cuts, sequence_of, world
from support.tiny_engine import Request, decode, greedy, make_pool, prefill
from support.tiny_models import model_folder, prompt

NAMES = ("llama", "qwen3", "mistral-window", "qwen2-yarn-window", "mixtral")


def alone(made: World) -> ModelRunner:
    model = made.runner.model
    return ModelRunner(
        StagePasses(model, make_pool(model, page_tokens=made.page_tokens, num_pages=128))
    )


def run_batch(batch: DecodeBatch) -> dict[str, list[TokenOut]]:
    outs: dict[str, list[TokenOut]] = {}
    while batch.size:
        for out in batch.step():
            outs.setdefault(out.request_id, []).append(out)
        batch.check_integrity()
    return outs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("workers", "ranks"), [(1, 1), (2, 1), (1, 0)])
def test_chunks_over_shards_give_the_logits_of_one_instance(
    name: str, workers: int, ranks: int
) -> None:
    """`ranks` of a KVP worker; 0: as many as there are KV heads."""
    rng = random.Random(f"{name} {workers}")
    tokens = prompt(rng.randrange(70, 140), seed=workers)
    model = load_model(model_folder(name), device="cpu")
    pools = ranks or model.config.num_kv_heads
    with world(model, workers, max_rows=9, pools=pools) as made:
        expected = prefill(alone(made), Request(alone(made), tokens))
        ends = [8 * rng.randrange(1, 6)]
        for _ in range(workers):
            ends.append(ends[-1] + 8 * rng.randrange(1, 5))
        ends[-1] = max(ends[-1], len(tokens))
        request = Long(made, tokens, ends)
        found = prefill_long(made.runner, request, random_cuts(rng, len(tokens), 3))
        assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inline_bytes", [0, 1200, 1 << 16])
def test_bfloat16_agrees_within_its_rounding(inline_bytes: int) -> None:
    """Rows written, written where they are many, and always in notifications."""
    tokens = prompt(120)
    model = load_model(model_folder("qwen3"), device="cpu", dtype="bfloat16")
    with world(model, 2, inline_bytes=inline_bytes) as made:
        runner = alone(made)
        expected = prefill(runner, Request(runner, tokens))
        found = prefill_long(made.runner, Long(made, tokens, (40, 80, 120)), (35, 70, 90))
        assert (found - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(("name", "workers"), [("llama", 1), ("qwen3-layer-types", 2)])
def test_a_batch_of_long_and_short_sequences_grows_over_boundaries(name: str, workers: int) -> None:
    """Some shards begin with generated tokens; some sequences still have all KV at the owner."""
    rng = random.Random(name)
    steps, page = 30, 8
    lengths = [rng.randrange(20, 60) for _ in range(5)]
    prompts = [prompt(length, seed=i) for i, length in enumerate(lengths)]
    with world(load_model(model_folder(name), device="cpu"), workers) as made:
        runner = alone(made)
        expected = greedy(runner, [Request(runner, p, steps) for p in prompts], steps)
        batch = DecodeBatch(made.runner, made.runner.pool, Sampler(), max_batch=8)
        for i, tokens in enumerate(prompts):
            needed = len(tokens) + steps
            ends = [page * rng.randrange(1, 8) for _ in range(workers + 1)] if i else []
            ends = sorted({*ends, page * -(-needed // page)})[: workers + 1] if i else [needed]
            ends[-1] = max(ends[-1], page * -(-needed // page))
            request = Long(made, tokens, ends)
            first = int(
                prefill_long(made.runner, request, random_cuts(rng, len(tokens), 2)).argmax()
            )
            assert first == expected[i][0]
            batch.add(sequence_of(request, str(i), first, steps))
        outs = run_batch(batch)
        for i, answer in enumerate(expected):
            assert [out.token_id for out in outs[str(i)]] == answer[1:]


def test_a_step_past_the_boundary_has_the_logits_of_one_instance() -> None:
    tokens = prompt(61)
    with world(load_model(model_folder("mistral-window"), device="cpu"), 2) as made:
        runner = alone(made)
        single, request = Request(runner, tokens, 30), Long(made, tokens, (32, 64, 96))
        prefill(runner, single)
        prefill_long(made.runner, request, (50,))
        for token in prompt(20, seed=4):
            single.tokens.append(token)
            request.tokens.append(token)
            n = len(request.tokens)
            task = request.task(n - 1, n)
            for _ in made.runner.prefill_batch([task]):
                pass
            assert_close(task.logits, decode(runner, [single])[0], rtol=1e-4, atol=1e-4)


def test_chunks_and_decodes_of_long_and_short_requests_in_one_pass() -> None:
    """Two sequences decode, two prompts come in chunks; one of either kind is spread."""
    rng, steps = random.Random(5), 9
    prompts = [prompt(length, seed=length) for length in (45, 38, 70, 33)]
    with world(load_model(model_folder("qwen3-layer-types"), device="cpu"), 2, max_rows=7) as made:
        runner = alone(made)
        expected = greedy(runner, [Request(runner, p, steps) for p in prompts], steps)
        requests = [
            Long(made, tokens, ends)
            for tokens, ends in zip(
                prompts, [(24, 48, 80), (80,), (16, 40, 80), (80,)], strict=True
            )
        ]
        batch = DecodeBatch(made.runner, made.runner.pool, Sampler(), max_batch=4)
        for i in (0, 1):
            first = int(prefill_long(made.runner, requests[i], ()).argmax())
            batch.add(sequence_of(requests[i], str(i), first, steps))
        found: dict[str, list[int]] = {str(i): [] for i in range(4)}
        cuts = {i: [0, *random_cuts(rng, len(prompts[i]), 3), len(prompts[i])] for i in (2, 3)}
        for number in range(4):
            tasks = [requests[i].task(*cuts[i][number : number + 2]) for i in (2, 3)]
            for row, task in enumerate(tasks, start=batch.size):
                batch.page_table.put(row, task.pages)
            table = batch.page_table.first(batch.size + 2)
            for out in batch.take(made.runner.mixed(batch.rows(), table, tasks)):
                found[out.request_id].append(out.token_id)
        for i, task in zip((2, 3), tasks, strict=True):
            assert task.logits is not None and not task.lost
            assert int(task.logits.argmax()) == expected[i][0]
            batch.add(sequence_of(requests[i], str(i), expected[i][0], steps))
        for name, outs in run_batch(batch).items():
            found[name] += [out.token_id for out in outs]
        assert found == {str(i): answer[1:] for i, answer in enumerate(expected)}


def test_hidden_states_of_every_position_are_there_where_they_are_wanted() -> None:
    tokens = prompt(50)
    with world(load_model(model_folder("llama"), device="cpu"), 2) as made:
        runner = alone(made)
        found = []
        for on, task in (
            (runner, Request(runner, tokens).task(0, 50)),
            (made.runner, Long(made, tokens, (16, 32, 56)).task(0, 50)),
        ):
            task.want_hidden = True
            for _ in on.prefill_batch([task]):
                pass
            assert task.hidden is not None and task.logits is not None
            found.append((task.hidden, task.logits))
        assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
