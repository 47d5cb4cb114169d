"""Runs a job's chunks operator by operator on the compute thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from millrace.engine.assembly import Engine
from millrace.engine.model_runner import PrefillTask
from millrace.engine.sampler import PositionLogprobs, Sampler, SamplingRow, prompt_logprobs
from millrace.prefill.job import PrefillJob
from millrace.wire.pb import scheduler_pb2
from millrace.worker.codec import passes, span


@dataclass(slots=True)
class PrefillOutcome:
    """Token one of each choice with its log-probabilities, and the prompt's where asked for."""

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None]
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    passes: int = 0


class Cancelled(Exception):
    """The job was cancelled between two operators."""


class PrefillCompute:
    """The compute thread's half of a prefill instance."""

    def __init__(
        self,
        engine: Engine,
        instance_id: str,
        max_chunk_tokens: int,
        report: Callable[[scheduler_pb2.WorkerMessage], None],
    ) -> None:
        self._engine = engine
        self._instance_id = instance_id
        self._max_chunk_tokens = max_chunk_tokens
        self._report = report
        self._sampler = Sampler()

    def run(self, job: PrefillJob, prompt_ids: torch.Tensor) -> PrefillOutcome:
        """Computes all chunks of a job and samples token one of every choice.

        prompt_ids: int64 [prompt_tokens] on the CPU. Raises Cancelled within one operator of a
        cancellation.
        """
        chunks = [(c.start_token, c.num_tokens) for c in job.command.chunks]
        parts = passes(chunks, self._max_chunk_tokens)
        want_prompt = job.sampling.prompt_logprobs >= 0
        found: list[PositionLogprobs] = []
        carry: torch.Tensor | None = None  # logits that predict the next part's first token
        logits: torch.Tensor | None = None
        spent_s = 0.0
        for number, (chunk, start, tokens) in enumerate(parts):
            if number == 0 or parts[number - 1][0] != chunk:
                self._started(job, chunk)
                spent_s = 0.0
            ids = prompt_ids[start : start + tokens]
            task = PrefillTask(
                token_ids=ids.to(self._engine.device),
                history_tokens=start,
                pages=job.pages,
                want_logits=number == len(parts) - 1,
                want_prompt_logprobs=want_prompt,
            )
            spent_s += self._run_pass(job, number, task)
            logits = task.logits
            if want_prompt and task.prompt_logits is not None:
                rows = task.prompt_logits
                predicting = rows[:-1] if carry is None else torch.cat([carry, rows[:-1]])
                targets = ids[1:] if carry is None else ids
                found += prompt_logprobs(predicting, targets, job.sampling.prompt_logprobs)
                carry = rows[-1:]
            if number == len(parts) - 1 or parts[number + 1][0] != chunk:
                self._finished(job, chunk, spent_s, last=number == len(parts) - 1)
        if logits is None:
            raise RuntimeError(f"request {job.request_id}: the last chunk gave no logits")
        return self._sample(job, logits, prompt_ids, found, len(parts))

    def _run_pass(self, job: PrefillJob, number: int, task: PrefillTask) -> float:
        start_s, begun = job.clock.now_s(), time.perf_counter()
        tokens = len(task.token_ids)
        boundaries = self._engine.runner.prefill(task)
        try:
            for boundary in boundaries:
                if job.cancelled:
                    raise Cancelled
                if boundary.operator == "attn" and job.session is not None:
                    job.session.layer_ready(number, boundary.layer, task.history_tokens, tokens)
        finally:
            boundaries.close()
        job.spans.append(
            span(
                f"chunk {number}",
                self._instance_id,
                start_s,
                job.clock.now_s(),
                tokens=tokens,
                history=task.history_tokens,
            )
        )
        return time.perf_counter() - begun

    def _sample(
        self,
        job: PrefillJob,
        logits: torch.Tensor,
        prompt_ids: torch.Tensor,
        found: list[PositionLogprobs],
        total_passes: int,
    ) -> PrefillOutcome:
        spec = job.sampling
        rows = [SamplingRow.first(spec, choice, prompt_ids) for choice in range(spec.n)]
        sampled = self._sampler.sample(logits.expand(spec.n, -1), rows)
        return PrefillOutcome(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=found,
            passes=total_passes,
        )

    def _started(self, job: PrefillJob, chunk: int) -> None:
        self._report(
            scheduler_pb2.WorkerMessage(
                chunk_started=scheduler_pb2.ChunkStarted(
                    request_id=job.request_id, chunk_index=chunk
                )
            )
        )

    def _finished(self, job: PrefillJob, chunk: int, compute_s: float, *, last: bool) -> None:
        self._report(
            scheduler_pb2.WorkerMessage(
                chunk_finished=scheduler_pb2.ChunkFinished(
                    request_id=job.request_id, chunk_index=chunk, compute_s=compute_s, last=last
                )
            )
        )
