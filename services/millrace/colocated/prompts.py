"""Tracks the prompts that a mixed instance computes, from their fetch to their end or failure."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count

import numpy as np

from millrace.colocated.compute import Iteration
from millrace.colocated.packing import IterationPacker, Plan, Prompt, Share
from millrace.colocated.prompt_spans import PromptSpans
from millrace.core.errors import IntegrityError
from millrace.core.scheduler.reports import ChunkFinished, ChunkStarted, PromptAdvanced
from millrace.core.token_events import FinishedPrefill, FirstToken
from millrace.decode.output.output import Output
from millrace.decode.request import DecodeEvent, DecodeRequest
from millrace.decode.request_table import RequestTable
from millrace.instance.role import WorkerContext
from millrace.instance.tasks import Tasks
from millrace.prefill.prompt import fetch_whole
from millrace.state.store import StoreError

log = logging.getLogger(__name__)


class Prompts:
    """The prompts of a mixed instance. Used from the event loop only."""

    def __init__(
        self,
        context: WorkerContext,
        table: RequestTable,
        output: Output,
        packer: IterationPacker,
        tasks: Tasks,
    ) -> None:
        self._send = context.send
        self._store = context.store
        self._table = table
        self._output = output
        self._packer = packer
        self._tasks = tasks
        self._orders = count()
        self._prompts: dict[str, Prompt] = {}

    @property
    def begun(self) -> int:
        """The number of prompts that are partly computed."""
        return sum(prompt.spans.has_begun for prompt in self._prompts.values())

    def waiting(self) -> list[Prompt]:
        """Lists the prompts that can be computed now; a spread prompt needs all its shards held."""
        return [p for p in self._prompts.values() if p.request.has_shards]

    def expect(self, request_id: str) -> None:
        """Fetches the prompt of an admitted request to compute it; ignores any other request."""
        request = self._table.live(request_id)
        if request is not None:
            self._tasks.spawn(self._fetch(request, next(self._orders)))

    async def _fetch(self, request: DecodeRequest, order: int) -> None:
        spans = PromptSpans(request.trace)
        try:
            ids = await fetch_whole(self._store, request.id, request.prompt_tokens)
        except StoreError as error:
            self._output.fail(request, str(error), "store")
            return
        if request.ended:
            return
        request.prompt_ids = ids.numpy().astype(np.int32)
        prompt = Prompt(
            request=request,
            ids=ids,
            pages=np.array(request.pages.of_choice(0), dtype=np.int32),
            standing=self._packer.standing(request, order),
            spans=spans,
        )
        self._prompts[request.id] = prompt
        if request.cached_tokens:
            spans.found(request.cached_tokens)
            self._packer.advance(prompt, request.cached_tokens)
        self._table.wake.set()

    def drop(self, request_id: str) -> None:
        """Removes the prompt of an ended request."""
        self._prompts.pop(request_id, None)

    def check_integrity(self) -> None:
        """Raises IntegrityError when the idle instance has a prompt."""
        if self._prompts:
            raise IntegrityError(f"prompts of ended requests: {sorted(self._prompts)}")

    # -- around an iteration

    def begin(self, plan: Plan) -> None:
        """Notes that an iteration with these shares begins; other prompts wait."""
        packed = {share.prompt.request.id for share in plan.shares}
        for name, prompt in self._prompts.items():
            if name not in packed:
                prompt.spans.leave()
        for share in plan.shares:
            prompt = share.prompt
            if not prompt.spans.has_begun:
                self._send(ChunkStarted(request_id=prompt.request.id))
            prompt.spans.takes_part(prompt.done)

    def take(self, plan: Plan, iteration: Iteration, now_s: float) -> Iterator[DecodeRequest]:
        """Applies an iteration's results. Yields the requests that have their first tokens now."""
        for share in plan.shares:
            prompt = share.prompt
            request = prompt.request
            is_last = share.is_last
            self._packer.advance(prompt, share.tokens)
            prompt.compute_s += iteration.seconds
            prompt.spans.computed(share.tokens)
            if request.ended:
                continue
            if (error := iteration.errors.get(request.id)) is not None:
                self._output.fail(request, error, "compute")
            elif (why := iteration.lost.get(request.id)) is not None:
                self._output.fail(request, why, "transfer")
            elif not is_last:
                self._advanced(prompt)
            else:
                self._packer.computed(prompt, now_s)
                first_tokens = iteration.first_tokens.get(request.id, ())
                self._through(share, first_tokens)
                yield request

    def _advanced(self, prompt: Prompt) -> None:
        request = prompt.request
        if prompt.steps.is_due(prompt.done, prompt.prompt_tokens):
            self._send(
                PromptAdvanced(request_id=request.id, attempt=request.attempt, tokens=prompt.done)
            )

    def _through(self, share: Share, first_tokens: tuple[FirstToken, ...]) -> None:
        """Ends a computed prompt: sends its first tokens, or the result of a prefill-only request;
        the request joins the batch if it is not complete."""
        prompt, request = share.prompt, share.prompt.request
        del self._prompts[request.id]
        prompt.spans.leave()
        self._send(ChunkFinished(request_id=request.id, compute_s=prompt.compute_s, last=True))
        request.start_choices([token.token_id for token in first_tokens])
        request.advance(DecodeEvent.KV_LANDED)
        self._output.first_tokens(request, _finished(prompt, first_tokens))
        self._table.join_if_ready(request)


def _finished(prompt: Prompt, first_tokens: tuple[FirstToken, ...]) -> FinishedPrefill:
    """Builds the same message as a prefill instance sends."""
    found = [one for run in prompt.logprobs for one in run.positions]
    asked = prompt.request.sampling.prompt_logprobs >= 0
    return FinishedPrefill(
        first_tokens=first_tokens,
        spans=prompt.request.trace.take(),
        prompt_logprobs=(None, *found) if asked else (),
        cached_tokens=prompt.request.cached_tokens,
        pooled=prompt.hidden_pool.vector(prompt.prompt_tokens),
    )
