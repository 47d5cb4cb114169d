"""Runs a job's chunks operator by operator on the compute thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from millrace.engine.assembly import Engine
from millrace.engine.logprobs import PositionLogprobs, position_logprobs
from millrace.engine.model_runner import ModelRunner, PrefillTask
from millrace.engine.sampler import Sampler
from millrace.engine.sampling_spec import SamplingRow
from millrace.prefill.job import Cancelled, PrefillJob
from millrace.prefill.metrics import PrefillMetrics
from millrace.prefill.publish import LayerPublisher
from millrace.wire.pb import scheduler_pb2
from millrace.worker.codec import passes, span

LOGPROB_BLOCK_TOKENS = 256


@dataclass(slots=True)
class PrefillOutcome:
    """Token one of each choice with its log-probabilities, and the prompt's where asked for."""

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None]
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    passes: int = 0


class _PromptLogprobs:
    """Log probabilities of the prompt's own tokens, position 1 on, in blocks of bounded memory."""

    def __init__(self, runner: ModelRunner, prompt_ids: torch.Tensor, top: int) -> None:
        self._runner = runner
        self._prompt_ids = prompt_ids
        self._top = top
        self.found: list[PositionLogprobs] = []

    @property
    def wanted(self) -> bool:
        return self._top >= 0

    def add(self, start: int, hidden: torch.Tensor) -> None:
        """hidden: [L, hidden_size] of the prompt's positions from `start` on."""
        for first in range(0, len(hidden), LOGPROB_BLOCK_TOKENS):
            rows = hidden[first : first + LOGPROB_BLOCK_TOKENS]
            targets = self._prompt_ids[start + first + 1 : start + first + 1 + len(rows)].tolist()
            logits = self._runner.project(rows[: len(targets)])
            self.found += position_logprobs(logits, targets, [self._top] * len(targets))


class PrefillCompute:
    """The compute thread's half of a prefill instance."""

    def __init__(
        self,
        engine: Engine,
        instance_id: str,
        max_chunk_tokens: int,
        report: Callable[[scheduler_pb2.WorkerMessage], object],
        metrics: PrefillMetrics,
    ) -> None:
        self._engine = engine
        self._instance_id = instance_id
        self._max_chunk_tokens = max_chunk_tokens
        self._report = report
        self._metrics = metrics
        self._sampler = Sampler()
        self._publisher = LayerPublisher(engine.device)

    def run(self, job: PrefillJob, prompt_ids: torch.Tensor) -> PrefillOutcome:
        """Computes all chunks of a job and samples token one of every choice.

        prompt_ids: int64 [prompt_tokens] on the CPU. Raises Cancelled, or the TransferError that
        leaves the result nowhere to go, within one operator of its cause.
        """
        chunks = [(c.start_token, c.num_tokens) for c in job.command.chunks]
        parts = passes(chunks, self._max_chunk_tokens)
        prompt = _PromptLogprobs(self._engine.runner, prompt_ids, job.sampling.prompt_logprobs)
        spent_s = 0.0
        for number, (chunk, start, tokens) in enumerate(parts):
            is_first = number == 0 or parts[number - 1][0] != chunk
            is_last = number + 1 == len(parts)
            if is_first:
                self._started(job, chunk)
                spent_s = 0.0
            task = PrefillTask(
                token_ids=prompt_ids[start : start + tokens].to(self._engine.device),
                history_tokens=start,
                pages=job.pages,
                want_logits=is_last,
                want_prompt_logprobs=prompt.wanted,
            )
            spent_s += self._run_pass(job, number, task)
            if task.hidden is not None:
                prompt.add(start, task.hidden)
            if is_last or parts[number + 1][0] != chunk:
                self._finished(job, chunk, spent_s, last=is_last)
        if task.logits is None:
            raise RuntimeError(f"request {job.request_id}: the last chunk gave no logits")
        return self._sample(job, task.logits, prompt_ids, prompt.found, len(parts))

    def close(self) -> None:
        self._publisher.close()

    def _run_pass(self, job: PrefillJob, number: int, task: PrefillTask) -> float:
        start_s, begun = job.clock.now_s(), time.perf_counter()
        tokens = len(task.token_ids)
        history = task.history_tokens
        try:
            for boundary in self._engine.runner.prefill(task):
                self._check(job)
                if boundary.operator == "attn" and (session := job.session) is not None:
                    self._publisher.after_device(
                        partial(session.layer_ready, number, boundary.layer, history, tokens)
                    )
        finally:
            self._publisher.flush()  # the pages must not be freed under the device's hands
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
        spent_s = time.perf_counter() - begun
        self._metrics.compute_s.observe(spent_s)
        self._metrics.tokens.inc(tokens)
        return spent_s

    def _check(self, job: PrefillJob) -> None:
        if job.cancelled:
            raise Cancelled
        if job.session is not None and job.session.failure is not None:
            raise job.session.failure

    def _sample(
        self,
        job: PrefillJob,
        logits: torch.Tensor,
        prompt_ids: torch.Tensor,
        found: list[PositionLogprobs],
        total_passes: int,
    ) -> PrefillOutcome:
        spec = job.sampling
        seen = prompt_ids.numpy() if spec.needs_prompt_ids else None
        rows = [SamplingRow.first(spec, choice, seen) for choice in range(spec.n)]
        sampled = self._sampler.sample(logits.expand(spec.n, -1), rows)
        if sampled.errors:
            raise RuntimeError(next(iter(sampled.errors.values())))
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
        self._metrics.chunks.inc()
        self._report(
            scheduler_pb2.WorkerMessage(
                chunk_finished=scheduler_pb2.ChunkFinished(
                    request_id=job.request_id, chunk_index=chunk, compute_s=compute_s, last=last
                )
            )
        )
