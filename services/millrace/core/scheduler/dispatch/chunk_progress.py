"""Reports of prefill instances about the chunks that they compute.

The leader reports for its group. A chunk's task leaves the run queue when it is finished. A request
whose last chunk is finished has its first token."""

from __future__ import annotations

from millrace.core.live_request import LiveRequest
from millrace.core.scheduler.dispatch.dispatcher import Dispatcher
from millrace.core.scheduler.dispatch.event_filter import EventFilter
from millrace.core.scheduler.fleet.instances import DecodeInstance, Instance
from millrace.core.scheduler.fleet.pool import ANYONE
from millrace.core.scheduler.fleet.task import Task
from millrace.core.scheduler.reports import ChunkFinished, ChunkStarted, ChunkSuspended
from millrace.core.scheduler.request_table import RequestTable
from millrace.core.scheduler.step_context import StepContext
from millrace.core.waits import TURN

_OfChunk = ChunkStarted | ChunkSuspended | ChunkFinished


class ChunkProgress:
    """Follows the tasks from their start to their end."""

    def __init__(
        self, table: RequestTable, dispatcher: Dispatcher, event_filter: EventFilter
    ) -> None:
        self._table = table
        self._dispatcher = dispatcher
        self._event_filter = event_filter

    def started(self, step: StepContext, instance: Instance, report: ChunkStarted) -> None:
        found = self._task_of(step, instance, report)
        if found is not None:
            task, request = found
            self._table.run_queue_of[request.id].started(task, step.now_s)
            request.start_chunk(step.now_s)
            self._table.cluster.policy.started(request)

    def suspended(self, step: StepContext, instance: Instance, report: ChunkSuspended) -> None:
        found = self._task_of(step, instance, report)
        if found is not None:
            task, request = found
            run_queue = self._table.run_queue_of[request.id]
            run_queue.suspended(task, report.compute_s)
            request.waits.suspend(run_queue.instead_of(task), step.now_s)
            request.suspend(self._executed_s(request) + report.compute_s)

    def finished(self, step: StepContext, instance: Instance, report: ChunkFinished) -> None:
        found = self._task_of(step, instance, report)
        if found is None:
            return
        task, request = found
        run_queue = self._table.run_queue_of[request.id]
        done = run_queue.finish(task, request)
        request.finish_chunk(report.chunk_index, self._executed_s(request))
        if request.chunks_done == len(request.chunks):
            self._table.run_queue_of.pop(request.id)
            self._table.computed(step, request)
        else:
            request.waits.enter(TURN, step.now_s)
        if done:
            pool = self._table.cluster.pool_of(instance)
            self._table.slow_instances.took(task, pool, report.compute_s, step.now_s)
            self._learn(task, request, report.compute_s)
            self._dispatcher.dispatch(step)

    def _learn(self, task: Task, request: LiveRequest, compute_s: float) -> None:
        """Corrects the predictions for the leader. Batches are predicted on the safe side."""
        if task.batched:
            return
        cluster, leader = self._table.cluster, task.members[0]
        pool = cluster.pool_of(leader)
        learning = [(cluster.corrections, leader.id), (pool.corrections, ANYONE)]
        if not self._table.slow_instances.names().isdisjoint(one.id for one in task.members):
            learning.pop()  # it tells nothing about the others
        for known, name in learning:
            known.observe(name, task.band, predicted_s=task.modelled_s, observed_s=compute_s)
        if task.is_alone and not task.executed_s:
            request.computed_in_one_span(compute_s)
            self._table.learn_on_top(request)

    def _task_of(
        self, step: StepContext, instance: Instance, report: _OfChunk
    ) -> tuple[Task, LiveRequest] | None:
        """The task that the report means, if its leader reports and the request still needs it."""
        if isinstance(instance, DecodeInstance) and instance.card.role == "mixed":
            self._mixed_reported(step, instance, report)
            return None
        run_queue = self._table.run_queue_of.get(report.request_id)
        if run_queue is not None:
            task = run_queue.find(report.request_id, report.chunk_index)
            if task is not None and task.members[0] is instance and task.ready:
                return task, self._table.requests[report.request_id]
        self._event_filter.ignored += 1
        return None

    def _mixed_reported(
        self, step: StepContext, instance: DecodeInstance, report: _OfChunk
    ) -> None:
        """Notes the begin and the end of a prefill; a mixed instance orders its own work."""
        request = self._table.served(report.request_id, instance)
        if isinstance(report, ChunkStarted) and request is not None:
            request.begin()
        elif isinstance(report, ChunkFinished) and request is not None:
            self._table.computed(step, request)
        else:
            self._event_filter.ignored += request is None

    def _executed_s(self, request: LiveRequest) -> float:
        """Returns the predicted seconds of the request's finished chunks."""
        left = self._table.run_queue_of[request.id].tasks.get(request.id, ())
        return request.predicted_prefill_s - sum(task.predicted_s for task in left)
