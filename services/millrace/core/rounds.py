"""Scheduling rounds: places waiting requests at decode instances, sends placed ones to prefill."""

from __future__ import annotations

from millrace.core.cluster import DecodeInstance, Pool, PrefillInstance
from millrace.core.decode_placement import freest
from millrace.core.effects import AdmitDecode, Place, RunPrefill
from millrace.core.lifecycle import Lifecycle
from millrace.core.planning import PLANNERS
from millrace.core.request import Chunk, Request, RequestState

#: So many requests at the head may wait for a decode instance's pages while later ones go ahead.
#: Each keeps one instance's pages to itself until it fits, so that smaller ones pass it on other
#: instances only: a large request is never starved, and does not stop the whole fleet either.
MAX_WAITING = 4


class Rounds:
    """Runs a round after every event that may have made room or brought work."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._cluster = life.cluster
        self._tasks_ahead = life.config.tasks_ahead
        self._plan = PLANNERS[life.config.planner]

    def run(self) -> None:
        """Places and dispatches all that has room now."""
        if self._life.unplaced:
            self._place_waiting()
        self.dispatch()

    def dispatch(self) -> None:
        """The second half alone, for events that made room at prefill instances only."""
        for pool in self._cluster.pools.values():
            if pool.line:
                self._dispatch(pool)

    def _place_waiting(self) -> None:
        unplaced = self._life.unplaced
        pools = self._cluster.ready_pools()
        reserved: set[str] = set()
        index = waiting = 0
        while pools and index < len(unplaced) and waiting < MAX_WAITING:
            request = unplaced[index]
            fitting = [
                decode
                for pool in pools
                if pool.could_prefill(request)
                for decode in pool.decode.values()
                if decode.could_hold(request)
            ]
            free = [decode for decode in fitting if decode.id not in reserved]
            best = freest(decode for decode in free if decode.has_room(request))
            if best is not None:
                self._place(request, best)
                continue
            if free:
                reserved.add(max(free, key=lambda d: (d.free_pages - d.virtual_pages, d.id)).id)
            # What fits nowhere (its instance died, or still holds an earlier attempt) blocks none.
            waiting += bool(fitting)
            index += 1

    def _place(self, request: Request, decode: DecodeInstance) -> None:
        life, pool = self._life, self._cluster.pool_of(decode)
        life.unqueue(request)
        decode.hold(request)
        request.decode_id = decode.id
        request.predicted_prefill_s = pool.prefill_s(request)
        life.effects.append(
            Place(
                request_id=request.id,
                proxy_id=request.proxy_id,
                decode_id=decode.id,
                predicted_ttft_s=self._predicted_ttft_s(request, pool),
            )
        )
        life.effects.append(AdmitDecode(instance_id=decode.id, request_id=request.id))
        life.record(request)
        life.enqueue(request, pool.line)

    def _predicted_ttft_s(self, request: Request, pool: Pool) -> float:
        """Work ahead plus the request's own chunk.

        With nobody in the pool's line it goes to the instance with the least work; else the work
        of the line and of all instances is taken to be shared evenly.
        """
        now_s = self._life.now_s
        ahead_s = [prefill.outstanding_s(now_s) for prefill in pool.prefill.values()]
        wait_s = (sum(ahead_s) + pool.line.work_s) / len(ahead_s) if pool.line else min(ahead_s)
        return wait_s + request.predicted_prefill_s

    def _dispatch(self, pool: Pool) -> None:
        index = 0
        while index < len(pool.line):
            request = pool.line[index]
            room = [
                prefill
                for prefill in pool.prefill.values()
                if len(prefill.tasks) < self._tasks_ahead and prefill.has_room(request)
            ]
            if room:
                self._send(request, self._plan(request, room, self._life.now_s))
            elif pool.could_prefill(request):
                return  # its turn comes first
            else:
                index += 1  # an earlier attempt is still wherever it could go

    def _send(self, request: Request, chunks: tuple[Chunk, ...]) -> None:
        assert request.decode_id is not None  # only placed requests are in a pool's line
        self._life.unqueue(request)
        request.chunks = chunks
        request.attempts += 1
        request.dispatched_s = self._life.now_s
        for instance_id in dict.fromkeys(i for chunk in chunks for i in chunk.instance_ids):
            instance = self._cluster.instances[instance_id]
            assert isinstance(instance, PrefillInstance)  # planners choose among these
            instance.hold(request, _work_s(instance, chunks))
            self._life.effects.append(
                RunPrefill(
                    instance_id=instance_id,
                    request_id=request.id,
                    chunks=chunks,
                    decode_id=request.decode_id,
                )
            )
        self._life.advance(request, RequestState.PREFILLING)


def _work_s(instance: PrefillInstance, chunks: tuple[Chunk, ...]) -> float:
    """Predicted seconds of the instance's part in the chunks."""
    return sum(
        instance.card.latency.chunk_s(chunk.num_tokens, chunk.start_token)
        for chunk in chunks
        if instance.id in chunk.instance_ids
    )
