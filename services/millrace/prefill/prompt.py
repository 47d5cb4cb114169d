"""Fetches the token ids of a job from the request store."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from millrace.prefill.job import PrefillJob
from millrace.state.store import RequestStore


async def fetch_prompt(store: RequestStore, job: PrefillJob) -> torch.Tensor:
    """Returns int64 [prompt_tokens] on the CPU: all ids, or those of a group member's shards.

    Ids that a member does not compute are 0. Prompt log-probabilities also need the id after each
    shard; penalties need the whole prompt at the leader. Raises StoreError.
    """
    needs_all = job.layout is None or (job.leads and job.sampling.needs_prompt_ids)
    if needs_all:
        return await fetch_whole(store, job.request_id, job.prompt_tokens)
    slices = shards(job)
    found = await store.prompt_slices(job.request_id, slices)
    prompt: npt.NDArray[np.int64] = np.zeros(job.prompt_tokens, dtype=np.int64)
    for (start, stop), ids in zip(slices, found, strict=True):
        prompt[start:stop] = ids
    return torch.from_numpy(prompt)


async def fetch_whole(store: RequestStore, request_id: str, prompt_tokens: int) -> torch.Tensor:
    """Returns int64 [prompt_tokens] on the CPU. Raises StoreError, also for too few ids."""
    ids = await store.prompt_ids(request_id, 0, prompt_tokens)
    return torch.from_numpy(ids).to(torch.int64)


def shards(job: PrefillJob) -> list[tuple[int, int]]:
    """Lists the [start, stop) ranges of a group's member, ascending; neighbours are merged."""
    assert job.layout is not None
    more = int(job.sampling.prompt_logprobs >= 0)
    wanted = sorted(
        (run.start_token, min(run.start_token + run.num_tokens + more, job.prompt_tokens))
        for run in job.layout.computed(job.instance_id)
    )
    joined: list[tuple[int, int]] = []
    for start, stop in wanted:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined
