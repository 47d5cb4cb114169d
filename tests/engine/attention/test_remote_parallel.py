"""A KV owner of several ranks with KVP workers: tensor parallelism times KVP."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from millrace.engine.decode_batch import DecodeBatch
from millrace.engine.forward.mixed_pass import NO_DECODES
from millrace.engine.kv.step_tables import page_table_of
from millrace.engine.model.loader import load_model
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.sampling.sampler import Sampler
from support.deadlines import HANG_S
from support.kvp_world import Long, random_cuts, sequence_of, world
from support.parallel import open_runner, split_folder
from support.tiny_engine import Request, greedy, make_runner
from support.tiny_models import prompt


@pytest.mark.parametrize("name", ["llama3-rope-tied", "qwen2-yarn-window"])
def test_ranks_spread_requests_over_workers(name: str) -> None:
    """Chunks that straddle shards, then decodes over a shard's end beside a short sequence."""
    rng, steps, folder = random.Random(name), 12, split_folder(name)
    prompts = [prompt(75, seed=1), prompt(40, seed=2)]
    wanted = make_runner(folder)
    expected = greedy(wanted, [Request(wanted, p, steps) for p in prompts], steps)
    model = load_model(folder, device="cpu")
    group = RankGroup(2, timeout_s=2 * HANG_S)
    runner = open_runner(group, folder, num_pages=96)
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
