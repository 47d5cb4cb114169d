"""Runs one iteration on the compute thread: decodes and shares of prompts in one pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from millrace.colocated.packing import Share
from millrace.core.token_events import FirstToken
from millrace.engine.assembly import Engine
from millrace.engine.decode_batch import DecodeBatch, TokenOut
from millrace.engine.errors import EngineDied
from millrace.engine.forward.pass_states import PassStates
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.sampling.sampler import Sampler
from millrace.prefill.compute.first_tokens import SamplingError, prompt_logprobs, sample_first

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Iteration:
    """The result of an iteration: a token per decode, the first tokens of finished prompts that are
    to be answered.

    errors: why a prompt failed, by request id; lost: why a prompt failed at this instance because a
    KVP worker lost its KV, by request id.
    """

    seconds: float = 0.0
    tokens: list[TokenOut] = field(default_factory=list)
    first_tokens: dict[str, tuple[FirstToken, ...]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


class MixedCompute:
    """Computes iterations: `run` on the compute thread; the batch changes only between runs."""

    def __init__(self, engine: Engine, max_batch: int) -> None:
        self._runner = engine.runner
        self._device = engine.device
        self._sampler = Sampler(engine.grammars)
        self.batch = DecodeBatch(engine.runner, engine.pool, self._sampler, max_batch=max_batch)
        engine.runner.follow(self.batch.page_table)

    @property
    def states(self) -> PassStates:
        """Returns the runner's states, which count steps and passes on a GPU."""
        return self._runner.states

    @torch.inference_mode()
    def run(self, shares: Sequence[Share]) -> Iteration:
        """Runs one iteration. If a pass with prompts fails, the prompts fail and decodes continue.

        Raises EngineDied when ranks are lost, and any error of a pass of decodes alone.
        """
        begun_s = time.perf_counter()
        result = Iteration()
        tasks = [self._task(share) for share in shares]
        if tasks:
            try:
                self._pass(shares, tasks, result)
            except EngineDied:
                raise
            except Exception as error:  # any error of a pass fails only its prompts
                log.exception("an iteration with %d prompts failed", len(shares))
                why = f"prefill failed: {error}"
                result.errors = {share.prompt.request.id: why for share in shares}
        else:
            result.tokens = self.batch.step()
        result.seconds = time.perf_counter() - begun_s
        return result

    def _task(self, share: Share) -> PrefillTask:
        prompt, request = share.prompt, share.prompt.request
        pools = prompt.hidden_pool.wants(has_last=share.is_last)
        return PrefillTask(
            token_ids=prompt.ids[prompt.done : prompt.done + share.tokens],
            history_tokens=prompt.done,
            pages=prompt.pages,
            want_logits=share.is_last and not request.prefill_only,
            want_hidden=pools or request.spec.needs_whole_prompt,
            shards=request.shards,
        )

    def _pass(
        self, shares: Sequence[Share], tasks: Sequence[PrefillTask], result: Iteration
    ) -> None:
        batch = self.batch
        for row, task in enumerate(tasks, start=batch.size):
            batch.page_table.put(row, task.pages)
        table = batch.page_table.first(batch.size + len(tasks))
        logits = self._runner.mixed(batch.rows(), table, tasks)
        result.tokens = batch.take(logits)
        for share, task in zip(shares, tasks, strict=True):
            self._conclude(share, task, result)
        if self._device.type == "cuda" and not (result.tokens or result.first_tokens):
            torch.cuda.current_stream(self._device).synchronize()  # no result came to the host

    def _conclude(self, share: Share, task: PrefillTask, result: Iteration) -> None:
        prompt, sampling = share.prompt, share.prompt.request.sampling
        name = prompt.request.id
        if task.lost:
            result.lost[name] = task.lost
            return
        if task.hidden is not None:
            prompt.hidden_pool.add(task.hidden, has_last=share.is_last)
        if task.hidden is not None and sampling.prompt_logprobs >= 0:
            top, start = sampling.prompt_logprobs, task.history_tokens
            run = prompt_logprobs(self._runner, top, prompt.ids, start, task.hidden)
            prompt.logprobs.append(run)
        if task.logits is None:
            return
        try:
            found = sample_first(self._sampler, sampling, prompt.ids, task.logits)
            result.first_tokens[name] = found
        except SamplingError as error:
            result.errors[name] = str(error)
