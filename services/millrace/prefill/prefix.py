"""Finds, sends and keeps cached prefixes of prompts at a prefill instance.

A prompt that one instance prefills alone, from its first token on, is computed after its cached
blocks. Their KV is sent from the cache while the rest is computed.

Every job leaves the whole blocks in its pages that begin at the prompt's first token. A job of one
instance leaves all blocks, also those after tokens that decode had kept. In a group, the leader
leaves the tokens that it computed alone or fetched, and its front shard of the next pass. The other
members hold no tokens from the first one on, as the layout makes sure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millrace.core.kv.prefix import reusable
from millrace.core.kv.sp_layout import Run
from millrace.instance.prefix import open_prefix_cache, prompt_blocks, report_cached
from millrace.instance.role import WorkerContext
from millrace.prefill.job import PrefillJob
from millrace.prefill.metrics import PrefillMetrics


class PromptPrefixes:
    """The prefix cache of a prefill instance. Used from the event loop only."""

    def __init__(self, context: WorkerContext, metrics: PrefillMetrics) -> None:
        engine = context.engine
        self.cache = open_prefix_cache(engine.pool, context.config.engine, context.registry)
        self._layout = engine.layout
        self._send = context.send
        self._metrics = metrics

    def wanted(self, job: PrefillJob) -> Sequence[int]:
        """Lists the blocks that the job may take from the cache.

        There are none where hidden states of the whole prompt are needed: the cache has KV alone.
        """
        blocks = prompt_blocks(job.command.request, self.cache)
        if not blocks or job.is_shared or job.needs_whole_prompt:
            return ()
        return reusable(blocks, job.prompt_tokens, self.cache.block_tokens)

    def found(self, job: PrefillJob, pages: Sequence[int]) -> None:
        """Notes the first pages of the job, which were cached."""
        if pages:
            job.found(len(pages) * self._layout.page_tokens)
            self._metrics.cached_tokens.inc(job.cached_tokens)

    def hand_over(self, job: PrefillJob) -> None:
        """Sends the cached tokens before the computed ones, as pass 0."""
        if job.cached_tokens and job.session is not None:
            for layer in self._layout.layers:
                job.session.layer_ready(0, layer, 0, job.cached_tokens)

    def keep(self, job: PrefillJob) -> None:
        """Caches the blocks of a job after its computation, and reports them."""
        if job.link is not None and job.link.is_aborted:
            return  # awaited KV may be missing
        if not (blocks := prompt_blocks(job.command.request, self.cache)):
            return
        pages, page_tokens = job.pages, self._layout.page_tokens
        if job.layout is not None:
            runs = (*job.layout.fetched.get(job.instance_id, ()), *(job.runs() or ()))
            pages = [pages[number] for number in leading_pages(runs, page_tokens)]
        whole = len(pages) * page_tokens // self.cache.block_tokens
        self.cache.keep(blocks[:whole], pages)
        report_cached(self.cache, self._send)


def leading_pages(runs: Iterable[Run], page_tokens: int) -> list[int]:
    """Lists the pages that hold the prompt's beginning in order: list entry i is its page i.

    `runs`: a member's tokens of the prompt, in the slots of all its pages. The list ends before the
    first page that lacks a token or holds it in another row.
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
