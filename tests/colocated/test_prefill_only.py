"""Prefill-only requests at a mixed instance: packed beside decodes, answered without a token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.deadlines import eventually
from support.mixed_role import Mixed, mixed_config, mixed_instance
from support.role_pair import with_blocks
from support.tiny_models import oracle, prompt
from support.worker_roles import spec

SMALL_CHUNKS = {"min_chunk_tokens": 8, "chunk_step_tokens": 8, "t_target_ms": 1.0}


def vector(mixed: Mixed, name: str) -> np.ndarray:
    event = next(event for event in mixed.events if event.request_id == name)
    assert event.finish_reason == "length" and not event.token_ids
    return np.frombuffer(event.detail().pooled, dtype="<f4")


@pytest.mark.parametrize("name", ["llama", "qwen3-moe-mixed"])
async def test_vectors_beside_answers(name: str) -> None:
    settings = mixed_config(SMALL_CHUNKS, max_chunk_tokens=64)
    async with mixed_instance(settings, name=name) as mixed:
        await mixed.ask("answer", 90, max_tokens=30)
        for pooling in ("last", "mean"):
            await mixed.submit(spec(pooling, 150, pooling=pooling, max_tokens=0), prompt(150))
        hidden = oracle(name).hidden(prompt(150)).numpy()
        for pooling, expected in (("last", hidden[-1]), ("mean", hidden.mean(0))):
            assert await mixed.answered(pooling) == []
            np.testing.assert_allclose(vector(mixed, pooling), expected, atol=2e-4)
            finished = await mixed.live.said("request_finished", pooling)
            assert (finished.reason, finished.generated_tokens) == ("length", 0)
            kinds = [kind for kind in mixed.live.kinds(pooling) if kind != "prompt_advanced"]
            assert kinds == ["chunk_started", "chunk_finished", "request_finished"]
        assert await mixed.answered("answer") == oracle(name).greedy(prompt(90), 30)
        await mixed.live.said("request_finished", "answer")
        assert mixed.used_pages == 0


async def test_log_probabilities_and_a_cached_prefix() -> None:
    """The cache serves the last token's vector; log probabilities and means compute all."""
    ids = prompt(200)
    async with mixed_instance(mixed_config(max_chunk_tokens=256, max_batch=4)) as mixed:
        for name, pooling, logprobs, cached in (
            *(("first", "last", -1, 0), ("again", "last", -1, 192)),
            *(("mean", "mean", -1, 0), ("scored", "", 0, 0)),
        ):
            request = spec(name, 200, pooling=pooling, max_tokens=0, prompt_logprobs=logprobs, n=2)
            await mixed.submit(with_blocks(request, ids), ids)
            await mixed.live.said("request_finished", name)
            await eventually(lambda name=name: (name, 1) in mixed.ends)  # an event per choice
            assert mixed.cached(name) == cached
        hidden = oracle("llama").hidden(ids).numpy()
        np.testing.assert_allclose(vector(mixed, "again"), hidden[-1], atol=2e-4)
        np.testing.assert_allclose(vector(mixed, "mean"), hidden.mean(0), atol=2e-4)
        event = next(event for event in mixed.events if event.request_id == "scored")
        found = [one.chosen[1] for one in event.detail().prompt_logprobs[1:]]
    wanted = oracle("llama").logits(ids)[:-1].log_softmax(-1)
    expected = wanted[torch.arange(199), torch.tensor(ids[1:])]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-3, atol=1e-3)
