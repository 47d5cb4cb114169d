"""Prefixes of prompts at a prefill instance: found, handed over, kept.

A prompt that one instance prefills alone, from its first token on, begins behind the blocks of it
that are cached. Their KV is sent as it lies there, while the rest is computed.

Every job leaves the blocks that lie whole in its pages, from the prompt's first one on: one that is
alone all of them, those behind what decode had kept included. Of a group the leader leaves what it
computed alone, or fetched, and its front shard of the pass behind that. The others have nothing
from the first token on: by the layout, without any rule here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millrace.core.kv.prefix import reusable
from millrace.core.kv.sp_layout import Run
from millrace.instance.host import WorkerContext
from millrace.instance.prefix import open_prefix_cache, prompt_blocks
from millrace.prefill.job import PrefillJob
from millrace.prefill.metrics import PrefillMetrics


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
        """All that the instance has to compute of the job is computed, and lies in its pages."""
        if job.link is not None and job.link.is_aborted:
            return  # what compute waited for need not have come
        if not (blocks := prompt_blocks(job.command.request, self.cache)):
            return
        pages, page_tokens = job.pages, self._layout.page_tokens
        if job.layout is not None:
            runs = (*job.layout.fetched.get(job.instance_id, ()), *(job.runs() or ()))
            pages = [pages[number] for number in leading_pages(runs, page_tokens)]
        whole = len(pages) * page_tokens // self.cache.block_tokens
        self.cache.keep(blocks[:whole], pages)


def leading_pages(runs: Iterable[Run], page_tokens: int) -> list[int]:
    """The pages that hold a prompt's beginning as one instance alone would: page i of it in each.

    `runs`: what a member has of the prompt, in the slots of all pages that it took. The first page
    of which a token is missing, or lies in another row, ends it.
    """
    pages: list[int] = []
    at = 0
    for run in sorted(runs, key=lambda run: run.start_token):
        first, row = divmod(run.slot, page_tokens)
        if run.start_token != at or row != at % page_tokens or (row and first != pages[-1]):
            break
        last = (run.slot + run.num_tokens - 1) // page_tokens
        pages += range(first + (row > 0), last + 1)
        at += run.num_tokens
    return pages[: at // page_tokens]
