"""The requests that have not ended: their queues, their holdings, their ends.

Every change of a request's state and every end of its holdings goes through this module, which
notes it in the step's effects, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from millrace.core.config import SchedulerConfig
from millrace.core.live_request import LiveRequest
from millrace.core.priority.own_order import ranking_of
from millrace.core.request import MIN_KEPT_TOKENS, RequestState
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.core.scheduler.fleet.instances import Holding, Instance, PrefillInstance
from millrace.core.scheduler.fleet.pool import Pool
from millrace.core.scheduler.fleet.run_queue import RunQueue
from millrace.core.scheduler.fleet.task import Task
from millrace.core.scheduler.fleet.waiting_queue import WaitingQueue
from millrace.core.scheduler.outcomes.breakers import Breakers
from millrace.core.scheduler.outcomes.ended_requests import EndedRequests
from millrace.core.scheduler.outcomes.objectives import mean_tbt_s
from millrace.core.scheduler.outcomes.slow_instances import SlowInstances
from millrace.core.scheduler.step_context import StepContext
from millrace.core.waits import DECODE_ROOM, PREFILL


class RequestTable:
    """Holds the live requests and the queues that they wait in."""

    def __init__(self, config: SchedulerConfig, cluster: Cluster) -> None:
        self.config = config
        self.cluster = cluster
        self.requests: dict[str, LiveRequest] = {}  # oldest first
        self.breakers = Breakers(config, cluster, self.requests)
        self.slow_instances = SlowInstances(config, cluster)
        self.by_proxy: dict[str, dict[str, None]] = {}
        self._unplaced_ranking = ranking_of(cluster.policy)
        self.unplaced = WaitingQueue(self._unplaced_ranking)
        self.waiting_queue_of: dict[str, WaitingQueue] = {}  # of every queued request
        self.run_queue_of: dict[str, RunQueue] = {}  # requests with something left to compute
        self.isolated: dict[str, LiveRequest] = {}  # requests that may only run alone
        self.release_timeouts = 0  # holdings freed without a report of their instance
        self.ended = EndedRequests()
        self._leaving: deque[tuple[float, Instance, Holding, str]] = deque()
        self._accepted = 0

    # ---- the table and the queues

    def add(self, step: StepContext, request: LiveRequest) -> None:
        """Accepts a new request; it waits to be placed."""
        request.accept(self._accepted)
        self._accepted += 1
        self.requests[request.id] = request
        self.by_proxy.setdefault(request.proxy_id, {})[request.id] = None
        self.enqueue(step, request, self.unplaced)

    def enqueue(self, step: StepContext, request: LiveRequest, line: WaitingQueue) -> None:
        line.add(request, step.now_s)
        self.waiting_queue_of[request.id] = line
        reason = DECODE_ROOM if line is self.unplaced else PREFILL
        request.waits.enter(reason, step.now_s)

    def rerank_unplaced(self, now_s: float) -> None:
        """Gives the requests that wait to be placed the keys that they have now."""
        keys = self._unplaced_ranking.update(now_s, len(self.cluster.instances))
        self.unplaced.rerank(keys)

    def change_policy(self, name: str, now_s: float) -> None:
        """Ranks everything again at once, since keys of two policies can't be compared."""
        self.cluster.rank_by(name, now_s)
        self._unplaced_ranking = ranking_of(self.cluster.policy)
        self.unplaced.rank_by(self._unplaced_ranking, now_s)

    def unqueue(self, request: LiveRequest) -> None:
        self.waiting_queue_of.pop(request.id).remove(request)

    def start(self, pool: Pool, tasks: Sequence[Task]) -> None:
        """Moves the requests of a plan's tasks from the pool's queue to its instances."""
        head, *others = tasks[0].requests
        pool.waiting.send(head)
        for request in others:
            pool.waiting.remove(request)
        for request in tasks[0].requests:
            del self.waiting_queue_of[request.id]
            self.run_queue_of[request.id] = pool.run_queue
        pool.run_queue.add(tasks)

    def advance(self, step: StepContext, request: LiveRequest, state: RequestState) -> None:
        """Moves the request to `state`, and records the change."""
        had_token = request.first_token_s is not None
        request.advance(state, step.now_s)
        if request.first_token_s is not None and not had_token:
            self.cluster.policy.first_token(request, step.now_s)
        elif state.is_final and not had_token:
            self.cluster.policy.ended(request, step.now_s)
        step.record(request)

    def learn_on_top(self, request: LiveRequest) -> None:
        """Corrects the predicted overhead of a first token, once both ends reported it."""
        overhead_s = request.take_overhead_s()
        owner = self.cluster.instances.get(request.decode_id or "")
        if overhead_s is not None and owner is not None:
            self.cluster.pool_of(owner).on_top.observe(request.prompt_tokens, overhead_s)

    def waiting_at(self, instance: Instance) -> set[str]:
        """Returns the requests whose prompts wait at a prefill or mixed instance: it computes none
        of them now, as far as its reports say.
        """
        return {
            request_id
            for request_id in instance.holdings
            if (request := self.served(request_id, instance)) and self._waits_at(instance, request)
        }

    def _waits_at(self, instance: Instance, request: LiveRequest) -> bool:
        if not isinstance(instance, PrefillInstance):
            return instance.card.role == "mixed" and not request.begun
        run_queue = self.run_queue_of.get(request.id)
        tasks = () if run_queue is None else run_queue.tasks.get(request.id, ())
        # The report of a start may be lost with the instance.
        return not any(
            instance in task.members
            and (task.started_s is not None or (task.chosen and task.ready))
            for task in tasks
        )

    def served(self, request_id: str, instance: Instance) -> LiveRequest | None:
        """Returns the request, if the instance holds its current attempt."""
        holding = instance.holdings.get(request_id)
        return None if holding is None or holding.leaving else self.requests[request_id]

    # ---- requests that run alone

    def restrict(self, request: LiveRequest, *, is_held: bool, is_isolated: bool) -> None:
        """Notes whether the request is held, and whether it may only run alone."""
        request.suspicion.restrict(is_held=is_held, is_isolated=is_isolated)
        if is_isolated:
            self.isolated[request.id] = request
        else:
            self.isolated.pop(request.id, None)

    def runs_alone(self) -> LiveRequest | None:
        """Returns the isolated request that is placed; there is one at most."""
        placed = (one for one in self.isolated.values() if self._is_placed(one))
        return next(placed, None)

    def must_wait(self, request: LiveRequest) -> bool:
        """Returns whether the request may not be placed now, however much room there is."""
        alone = request.suspicion.is_isolated and self.runs_alone() is not None
        return alone or request.suspicion.is_held

    def _is_placed(self, request: LiveRequest) -> bool:
        return self.waiting_queue_of.get(request.id) is not self.unplaced

    def closed_to_all(self) -> set[str]:
        """Returns the instances that may take no request: their breaker is open, or they lag."""
        return self.breakers.closed_to_all() | self.slow_instances.closed()

    def closed_to(self, request: LiveRequest) -> set[str]:
        """Returns the instances that may not take it: closed ones, and where one may run alone."""
        closed = self.closed_to_all()
        if request.suspicion.is_isolated:
            return closed | {one.id for one in self.cluster.instances.values() if one.holdings}
        if (alone := self.runs_alone()) is None:
            return closed
        return closed | {one.id for one in self._instances_of(alone) if alone.id in one.holdings}

    # ---- ends and second attempts

    def lost(
        self,
        step: StepContext,
        request: LiveRequest,
        instance: Instance,
        why: str,
        kept_tokens: int = 0,
    ) -> None:
        """Handles an instance that can't do its part: prefills again, unless the first token may be
        out.

        A lost prefill instance costs the KV that has not landed at decode. Decode reports how much
        it keeps, and if it keeps anything, waits for the next attempt.
        """
        reporter: Instance | None = None if kept_tokens else instance
        if isinstance(instance, PrefillInstance):
            kept_tokens = request.landed_tokens
        self._again(step, request, why, instance, reporter, kept_tokens)

    def take_back(self, step: StepContext, request: LiveRequest, why: str) -> None:
        """Plans a request without progress again, after the tokens that have landed."""
        self._again(step, request, why, None, None, request.landed_tokens)

    def _again(
        self,
        step: StepContext,
        request: LiveRequest,
        why: str,
        instance: Instance | None,
        reporter: Instance | None,
        kept_tokens: int,
    ) -> None:
        kept_tokens = min(
            kept_tokens, request.prompt_tokens - 1
        )  # the first output token needs the last
        # A spread request starts from its beginning, a held one may have to run elsewhere.
        resumable = request.resumable and not request.shards and not request.suspicion.is_held
        if request.state not in (RequestState.QUEUED, RequestState.PREFILLING):
            self.fail(step, request, f"{why} after the first token", reporter, resumable=True)
        elif kept_tokens >= MIN_KEPT_TOKENS and resumable:
            self._resume(step, request, why, instance, kept_tokens)
        else:
            self.retry(step, request, why, reporter)

    def _resume(
        self,
        step: StepContext,
        request: LiveRequest,
        why: str,
        reporter: Instance | None,
        kept_tokens: int,
    ) -> None:
        """Puts the request back in the pool's queue, to continue after its kept tokens."""
        if request.state is RequestState.PREFILLING and request.advances_to(kept_tokens):
            request.forgive_attempt()
        if request.attempts >= self.config.max_attempts:
            known = reporter if isinstance(reporter, PrefillInstance) else None
            self.retry(step, request, why, known)
            return
        decode = self.cluster.instances[request.decode_id or ""]
        self._withdraw(step, request, why, reporter, but=decode)
        request.resume(kept_tokens, step.now_s)
        pool = self.cluster.pool_of(decode)
        if pool.prefill:
            pool.predict(request)
        step.admit(request)
        step.record(request)
        self.enqueue(step, request, pool.waiting)

    def retry(
        self, step: StepContext, request: LiveRequest, why: str, reporter: Instance | None = None
    ) -> None:
        """Puts the request back to be placed, in its old order, unless it had all its attempts."""
        if request.attempts >= self.config.max_attempts:
            self.fail(step, request, f"{why}; {request.attempts} attempts were made", reporter)
            return
        self._withdraw(step, request, why, reporter)
        request.unplace(step.now_s)
        step.record(request)
        self.enqueue(step, request, self.unplaced)

    def fail(
        self,
        step: StepContext,
        request: LiveRequest,
        message: str,
        reporter: Instance | None = None,
        *,
        resumable: bool = False,
        prompt_unread: bool = False,
        quarantined: bool = False,
    ) -> None:
        """Ends the request by an error. A `resumable` one is cancelled: its proxy migrates it, or,
        if that proxy dies, the replica that adopts its stream.
        """
        step.fail(
            request,
            message,
            resumable=resumable,
            prompt_unread=prompt_unread,
            quarantined=quarantined,
        )
        state = RequestState.CANCELLED if resumable else RequestState.FAILED
        self.end(step, request, state, message, reporter)

    def end(
        self,
        step: StepContext,
        request: LiveRequest,
        state: RequestState,
        reason: str | None,
        reporter: Instance | None = None,
    ) -> None:
        """Forgets the request. Its holdings stay until their instances free them.

        Instances get a cancel, except the `reporter`, which knows of the end. Without a reason no
        instance gets one: each ends its part itself.
        """
        self._withdraw(step, request, reason, reporter)
        del self.requests[request.id]
        self.isolated.pop(request.id, None)
        self._disown(request)
        self.advance(step, request, state)
        self.ended.add(request, step.now_s)

    def finish(
        self,
        step: StepContext,
        request: LiveRequest,
        generated_tokens: int | None,
        reason: str | None = None,
    ) -> None:
        """Forgets a request whose answer is complete, and learns how it went.

        generated_tokens: of all choices; None where that is not known.
        """
        self.end(step, request, RequestState.FINISHED, reason)
        tbt_s = None
        if generated_tokens is not None and not request.prefill_only:
            tbt_s = mean_tbt_s(request, generated_tokens, step.now_s)
            self.cluster.answer_lengths.ended(request, generated_tokens)
        self.cluster.policy.finished(request, step.now_s, tbt_s)

    def _withdraw(
        self,
        step: StepContext,
        request: LiveRequest,
        reason: str | None,
        reporter: Instance | None,
        but: Instance | None = None,
    ) -> None:
        """Lets the request go at all instances `but` one."""
        if request.state is RequestState.QUEUED:
            self.unqueue(request)
        self.drop_tasks(request)
        for instance in self._instances_of(request):
            holding = instance.holdings.get(request.id)
            if holding is not None and not holding.leaving and instance is not but:
                self.let_go(step, request.id, instance, None if instance is reporter else reason)

    def let_go(
        self, step: StepContext, request_id: str, instance: Instance, reason: str | None
    ) -> None:
        """Has the instance drop the request; with no reason it does so by itself. It is asked to
        answer again if another scheduler may have had its answer.
        """
        holding = instance.holdings[request_id]
        holding.leaving = True
        limit_s = step.now_s + self.config.release_timeout_s
        self._leaving.append((limit_s, instance, holding, request_id))
        if reason is not None or holding.is_adopted:
            step.cancel(request_id, instance.id, reason or "the request has ended")

    def reown(self, request: LiveRequest, proxy_id: str) -> None:
        """Sends the request's messages to another connection of its proxy from now on."""
        self._disown(request)
        request.reown(proxy_id)
        self.by_proxy.setdefault(proxy_id, {})[request.id] = None

    def _disown(self, request: LiveRequest) -> None:
        siblings = self.by_proxy[request.proxy_id]
        del siblings[request.id]
        if not siblings:
            del self.by_proxy[request.proxy_id]

    def drop_tasks(self, request: LiveRequest) -> bool:
        """Removes the request's tasks; False when it had nothing left to compute."""
        run_queue = self.run_queue_of.pop(request.id, None)
        if run_queue is None:
            return False
        run_queue.remove(request.id)
        return True

    def computed(self, step: StepContext, request: LiveRequest) -> None:
        """Notes that all of the prompt is computed: the first token is known."""
        if request.state is RequestState.PREFILLING:
            self.advance(step, request, RequestState.TRANSFERRING)

    def did_part(self, request: LiveRequest, instance: Instance) -> None:
        """Notes that a member holds nothing of the request any more, which other members still
        compute.
        """
        run_queue = self.run_queue_of.get(request.id)
        if run_queue is not None and isinstance(instance, PrefillInstance):
            run_queue.leave(request.id, instance)

    def _instances_of(self, request: LiveRequest) -> Iterator[Instance]:
        instances = self.cluster.instances
        return (instances[name] for name in request.instance_ids if name in instances)

    # ---- time

    def expire(self, step: StepContext) -> None:
        """Ends requests past their deadline, and frees holdings that no report has freed."""
        limit_s = self.config.request_timeout_s
        while self.requests:
            oldest = next(iter(self.requests.values()))
            if step.now_s - oldest.arrival_s < limit_s:
                break
            self.fail(step, oldest, f"the request took longer than {limit_s:g} s")
        while self._leaving and self._leaving[0][0] <= step.now_s:
            _, instance, holding, request_id = self._leaving.popleft()
            if instance.holdings.get(request_id) is holding:
                instance.release(request_id)
                self.release_timeouts += 1


def still_needs(request: LiveRequest, instance: Instance) -> bool:
    """Whether the request can't continue without the instance, which holds its current attempt.

    A prefill instance is done with a request once its cache has landed: the request decodes.
    """
    return not isinstance(instance, PrefillInstance) or request.state is not RequestState.DECODING
