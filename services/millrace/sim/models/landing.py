"""Computes the part of a prompt that decode holds when its prefill dies, also in the middle of a
chunk.

A live decode instance reports each pass that lands. Only a death makes use of these reports, so the
simulator computes one report when an instance dies, and reports it right before the death.
"""

from __future__ import annotations

from millrace.core.scheduler.reports import PrefixLanded
from millrace.sim.cluster.job import Attempt
from millrace.sim.cluster.world import World
from millrace.sim.models.prefill_work import PrefillTimes
from millrace.sim.models.transfer_model import Transfers


class Landing:
    """Reports landed prefixes to the scheduler."""

    def __init__(self, world: World, times: PrefillTimes, transfers: Transfers) -> None:
        self._world = world
        self._times = times
        self._transfers = transfers

    def report(self, attempt: Attempt) -> None:
        """Reports the landed tokens of the attempt, which has not ended."""
        decode, chunks = attempt.decode, attempt.chunks
        if decode is None or not decode.alive or attempt.done == len(chunks):
            return
        chunk, task = chunks[attempt.done], attempt.tasks[attempt.done]
        running = 0
        if task.begun and len(task.parts) == 1:
            position_s = task.done_s
            if task.started_s is not None:
                position_s += (self._world.clock.now_s - task.started_s) / task.factor
            sp = len(chunk.instance_ids)
            running = self._times.tokens_done(chunk.num_tokens, chunk.start_token, sp, position_s)
        tokens = self._transfers.landed_tokens(attempt, chunk.start_token, running, task.begun_s)
        if tokens > chunks[0].start_token:
            landed = PrefixLanded(request_id=attempt.job.id, attempt=attempt.number, tokens=tokens)
            self._world.report(decode.id, decode.generation, landed)
