"""KV owners and KVP workers of several ranks: tensor parallelism times KVP."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from millrace.engine.decode_batch import DecodeBatch
from millrace.engine.forward.mixed_pass import NO_DECODES
from millrace.engine.kv.step_tables import page_table_of
from millrace.engine.model.loader import load_model
from millrace.engine.parallel.member_pools import MemberPools, services
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.sampling.sampler import Sampler
from support.deadlines import HANG_S
from support.kvp_world import Long, check_holds_a_shard, random_cuts, sequence_of, world
from support.parallel import open_runner, split_folder, whole_layout
from support.tiny_engine import Request, greedy, make_runner
from support.tiny_models import prompt


@pytest.mark.parametrize(
    ("name", "ranks", "own_pools"),
    [
        ("llama3-rope-tied", 2, False),
        ("llama3-rope-tied", 2, True),
        ("qwen2-yarn-window", 4, True),
    ],
)
def test_ranks_spread_requests_over_workers(name: str, ranks: int, own_pools: bool) -> None:
    """Chunks that straddle shards, then decodes over a shard's end beside a short sequence. Four
    ranks hold qwen2's two KV heads twice."""
    rng, steps, folder = random.Random(name), 12, split_folder(name)
    prompts = [prompt(75, seed=1), prompt(40, seed=2)]
    wanted = make_runner(folder)
    expected = greedy(wanted, [Request(wanted, p, steps) for p in prompts], steps)
    model = load_model(folder, device="cpu")
    group = RankGroup(ranks, timeout_s=2 * HANG_S)
    runner = open_runner(group, folder, num_pages=96, own_pools=own_pools)
    try:
        with world(model, 2, page_tokens=16, max_rows=9, runner=runner) as made:
            requests = [Long(made, prompts[0], (32, 80, 96)), Long(made, prompts[1], (64,))]
            batch = DecodeBatch(runner, runner.pool, Sampler(), max_batch=4)
            for i, request in enumerate(requests):
                cuts = [0, *random_cuts(rng, len(request.tokens), 3), len(request.tokens)]
                for start, stop in pairwise(cuts):
                    task = request.task(start, stop)
                    runner.mixed(NO_DECODES, page_table_of([task.pages]), [task])
                assert task.logits is not None and int(task.logits.argmax()) == expected[i][0]
                batch.add(sequence_of(request, str(i), expected[i][0], steps))
            found: dict[str, list[int]] = {"0": [], "1": []}
            while batch.size:
                for out in batch.step():
                    found[out.request_id].append(out.token_id)
        assert found == {str(i): answer[1:] for i, answer in enumerate(expected)}
    finally:
        runner.processes.close()


@pytest.mark.parametrize(("name", "ranks"), [("llama3-rope-tied", 2), ("qwen2-yarn-window", 4)])
def test_ranks_with_pools_of_their_own_attend_for_an_owner(name: str, ranks: int) -> None:
    """Each with its heads."""
    folder = split_folder(name)
    group = RankGroup(ranks, timeout_s=2 * HANG_S, beside=services(None))
    worker = open_runner(group, folder, own_pools=True)
    layout = whole_layout(worker.pool.layout, ranks)
    try:
        check_holds_a_shard(folder, worker, MemberPools.of(layout, [group.besides]).shards)
    finally:
        worker.processes.close()
