"""Caches the KV of ended requests at a decode instance, for prompts that begin with it.

A request leaves the whole blocks of its prompt, by the hashes that its proxy gave, and of its
answer (of choice 0), hashed here. A conversation's next prompt begins with both. A request that the
scheduler admits with `kept_tokens` begins with such pages, as if an earlier attempt had left them:
prefill continues after them.
"""

from __future__ import annotations

import logging
from array import array

from millrace.core.errors import MillraceError, TransferError
from millrace.core.kv.prefix import block_hashes
from millrace.core.scheduler.commands import AdmitDecode
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.request import DecodeRequest
from millrace.instance.prefix import (
    open_prefix_cache,
    prompt_blocks,
    report_cached,
    takes_part,
)
from millrace.instance.role import WorkerContext
from millrace.instance.tasks import Tasks

log = logging.getLogger(__name__)


class RequestPrefixes:
    """The prefix cache of a decode instance. Used from the event loop only."""

    def __init__(self, context: WorkerContext, metrics: DecodeMetrics, tasks: Tasks) -> None:
        engine = context.engine
        self.cache = open_prefix_cache(engine.pool, context.config.engine, context.registry)
        self._page_tokens = engine.layout.page_tokens
        self._store = context.store
        self._send = context.send
        self._metrics = metrics
        self._tasks = tasks

    def take(self, admit: AdmitDecode) -> list[int]:
        """Takes the pages of the request's `kept_tokens`, one reference each.

        Raises TransferError, and takes none, when not all of the tokens are cached.
        """
        tokens = admit.kept_tokens
        if not tokens:
            return []
        blocks = prompt_blocks(admit.request, self.cache)
        wanted = blocks[: tokens // self.cache.block_tokens] if blocks else blocks
        found = self.cache.holds(wanted) * self.cache.block_tokens
        if found != tokens:
            raise TransferError(f"{found} of the {tokens} tokens that were to be kept are here")
        return self.cache.take(wanted)

    def found(self, request: DecodeRequest, cached_tokens: int) -> None:
        """Notes that the first `cached_tokens` tokens of the request are cached."""
        request.cached_tokens = cached_tokens
        if cached_tokens:
            self._metrics.cached_tokens.inc(cached_tokens)
            now_s = request.clock.now_s()
            request.trace.add("cached", now_s, now_s, tokens=cached_tokens)

    def joined(self, request: DecodeRequest) -> None:
        """Reads the ids of the prompt's last tokens, which fill no block, while the answer is
        generated: the answer's first hash needs them."""
        if not takes_part(request.spec, self.cache) or request.prompt_ids is not None:
            return
        block_tokens = self.cache.block_tokens
        rest = request.prompt_tokens % block_tokens
        if rest and rest + request.sampling.max_tokens - 1 >= block_tokens:
            self._tasks.spawn(self._read_tail(request, request.prompt_tokens - rest))

    async def _read_tail(self, request: DecodeRequest, start: int) -> None:
        try:
            request.prompt_tail = await self._store.prompt_ids(request.id, start)
        except MillraceError as error:
            log.debug("the answer of request %s is not kept: %s", request.id, error)

    def keep(self, request: DecodeRequest) -> None:
        """Caches the blocks of a request before its pages are freed, if their KV is whole, and
        reports them."""
        if not (request.has_kv and takes_part(request.spec, self.cache)):
            return
        if 0 not in request.pages.own:  # choice 0 had ended when the others were swapped out
            return
        blocks = list(prompt_blocks(request.spec, self.cache))
        blocks += self._answer_blocks(request, blocks)
        pages = request.pages.of_choice(0)
        self.cache.keep(blocks[: len(pages) * self._page_tokens // self.cache.block_tokens], pages)
        report_cached(self.cache, self._send)

    def _answer_blocks(self, request: DecodeRequest, prompt: list[int]) -> list[int]:
        """Hashes the whole blocks after the prompt's. The last token's KV was not computed."""
        block_tokens = self.cache.block_tokens
        start = len(prompt) * block_tokens
        ids = array("i")
        if start < request.prompt_tokens:
            tail = request.prompt_tail
            if request.prompt_ids is not None:
                tail = request.prompt_ids[start:]
            if tail is None:
                return []
            ids.extend(tail.tolist())
        ids += request.answer_ids[:-1]
        return block_hashes(ids, block_tokens, prompt[-1] if prompt else request.spec.prefix_root)
