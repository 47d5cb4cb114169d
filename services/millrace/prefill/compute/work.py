"""Splits a prepared job into forward passes, and records their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from millrace.core.kv.sp_layout import ChunkShares, pass_tokens
from millrace.prefill.compute.first_tokens import LogprobsRun, PrefillOutcome
from millrace.prefill.job import PrefillJob


@dataclass(slots=True, eq=False)
class Part:
    """The share of one job in one forward pass."""

    work: Work
    number: int  # of the job's passes
    chunk: int
    start: int
    tokens: int
    error: Exception | None = None  # why its result is dropped

    @property
    def name(self) -> str:
        return f"chunk {self.number}"


class Work:
    """The computation of one job at this instance.

    Cached tokens are not computed. For the receiver of the KV they are pass 0, and the first
    computed pass is then number 1.

    ``outcome``: the result of the last pass, at the request's leader. ``prompt_logprobs``: those of
    the tokens that this instance computed, if requested, in any order.
    """

    def __init__(
        self,
        job: PrefillJob,
        prompt_ids: torch.Tensor,
        max_chunk_tokens: int,
        done: Callable[[Exception | None], None],
    ) -> None:
        """prompt_ids: int64 [prompt_tokens] on the CPU; a group's member has only the ids of its
        shards and the id after each shard. `done` gets the error, or None, at the end.
        """
        self.job = job
        self.prompt_ids = prompt_ids
        self.done = done
        self.parts: list[Part] = []
        self.first_chunk = 0
        if job.layout is None:
            self._add_alone(max_chunk_tokens)
            self.first_chunk = self.parts[0].chunk
        else:
            self.first_chunk = job.layout.first_chunk(job.instance_id)
            self.parts = [
                Part(self, one.number, index, one.start_token, one.num_tokens)
                for index, shares in enumerate(job.layout.chunks)
                for one in shares.passes
            ]
        self.outcome: PrefillOutcome | None = None
        self.prompt_logprobs: list[LogprobsRun] = []

    @property
    def passes(self) -> int:
        """The number of passes of the whole request."""
        return self.parts[-1].number + 1

    def of_chunk(self, chunk: int) -> list[Part]:
        return [part for part in self.parts if part.chunk == chunk]

    def is_last(self, part: Part) -> bool:
        return part is self.parts[-1]

    def shares(self, chunk: int) -> ChunkShares | None:
        """Returns the chunk's shares in its group; None when this instance computes it alone from
        pages in token order."""
        layout = self.job.layout
        if layout is None:
            return None
        shares = layout.chunks[chunk]
        is_plain = len(shares.group) == 1 and not layout.chunks[0].chunk.start_token
        return None if is_plain else shares

    def failure(self) -> Exception | None:
        """Returns why the result has no receiver any more; None if it has one."""
        if self.job.failure is not None:
            return self.job.failure
        return None if self.job.session is None else self.job.session.failure

    def _add_alone(self, max_chunk_tokens: int) -> None:
        cached = self.job.cached_tokens
        number = 1 if cached else 0
        for index, chunk in enumerate(self.job.chunks):
            start, end = max(chunk.start_token, cached), chunk.start_token + chunk.num_tokens
            if start >= end:
                continue  # the whole chunk was cached
            for tokens in pass_tokens(end - start, 1, max_chunk_tokens):
                self.parts.append(Part(self, number, index, start, tokens))
                start += tokens
                number += 1


def task_name(request_id: str, chunk: int) -> str:
    """Names the pool's task that computes a chunk of a request."""
    return f"{request_id}/{chunk}"


def request_of(task: str) -> str:
    """Returns the request id in the name of a pool's task."""
    return task.rpartition("/")[0]


def task_names(job: PrefillJob) -> list[str]:
    """Lists the names of all tasks of the job at this instance."""
    mine = (chunk.index for chunk in job.chunks if job.instance_id in chunk.instance_ids)
    return [task_name(job.request_id, index) for index in mine]
