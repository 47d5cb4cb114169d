"""Prefixes of prompts at a prefill instance: found, handed over, kept.

A prompt that one instance prefills alone, from its first token on, begins behind the blocks of it
that are cached. Their KV is sent as it lies there, while the rest is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.core.prefix import reusable
from millrace.prefill.job import PrefillJob
from millrace.prefill.metrics import PrefillMetrics
from millrace.worker.host import WorkerContext
from millrace.worker.prefix import open_prefix_cache, prompt_blocks


class PromptPrefixes:
    """Used from the event loop only."""

    def __init__(self, context: WorkerContext, metrics: PrefillMetrics) -> None:
        engine = context.engine
        self.cache = open_prefix_cache(engine.pool, context.config.engine, context.registry)
        self._layout = engine.layout
        self._metrics = metrics

    def wanted(self, job: PrefillJob) -> Sequence[int]:
        """Blocks that the job need not compute, where they are cached.

        Who asked for the prompt's log-probabilities is to get those of all of it.
        """
        blocks = prompt_blocks(job.command.request, self.cache)
        if not blocks or job.is_shared or job.sampling.prompt_logprobs >= 0:
            return ()
        return reusable(blocks, job.prompt_tokens, self.cache.block_tokens)

    def found(self, job: PrefillJob, pages: Sequence[int]) -> None:
        """These of the job's pages, its first ones, were cached."""
        if pages:
            job.found(len(pages) * self._layout.page_tokens)
            self._metrics.cached_tokens.inc(job.cached_tokens)

    def hand_over(self, job: PrefillJob) -> None:
        """Sends what was found, ahead of what is computed: to the receiver it is pass 0."""
        if job.cached_tokens and job.session is not None:
            for layer in self._layout.layers:
                job.session.layer_ready(0, layer, 0, job.cached_tokens)

    def keep(self, job: PrefillJob) -> None:
        """All of the job's prompt is computed, and lies in its pages."""
        if not job.is_shared:
            self.cache.keep(prompt_blocks(job.command.request, self.cache), job.pages)
