"""The run queue of a pool's prefill instances: which task runs now, and which runs next.

A task is one chunk of a request on its group of instances (or whole prompts batched on one). The
run queue ranks all tasks that instances hold by the policy's keys. It picks, in that order, the
tasks whose members are all unclaimed: these run now. All instances have one order, so no two groups
that need several instances wait for each other in a circle.

With preemption a task that can't start (a member belongs to a better task, or its earlier chunk is
not done) claims nothing: later tasks may use its members meanwhile and yield when it can start.
Without preemption a running task keeps its members, and a waiting task keeps its turn on its
members here, as in the queues of Tetris section 5.1. The instances follow that order among the
tasks that all their members have: a member that joins its group at a later chunk runs other tasks
until the gang opens (`core.instance.gang`)."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

from millrace.core.live_request import LiveRequest
from millrace.core.priority import PriorityKey, Ranking
from millrace.core.scheduler.effects import Order
from millrace.core.scheduler.fleet.task import Rank, Task

if TYPE_CHECKING:
    from millrace.core.scheduler.fleet.instances import PrefillInstance

#: Queue time that work which would yield adds, per second of it: planners then prefer, among
#: instances that are equally soon free, the instance where the least is disturbed.
YIELDING_WEIGHT = 1e-3

#: More new keys than one in so many tasks are sorted in, fewer are moved one by one.
_SORTS_FROM = 8

_rank = attrgetter("rank")


class RunQueue:
    """The tasks that a pool's prefill instances hold, best first."""

    def __init__(self, ranking: Ranking, *, preemptive: bool) -> None:
        """The requests that head tasks are in `ranking` when these are added, and leave it with
        their last one.
        """
        self._ranking = ranking
        self.preemptive = preemptive
        self.ranked: list[Task] = []
        self.tasks: dict[str, list[Task]] = {}  # request id -> its unfinished tasks, in order
        self.preemptions = 0
        self.everyone = 0  # bits of the pool's prefill instances, draining ones too
        #: Their queues differ from their last order. Others are sorted, after what runs there.
        self._stale: dict[PrefillInstance, None] = {}
        self._unordered: set[PrefillInstance] = set()  # their order is another scheduler's
        self._chosen: list[Task] = []  # by the last round
        #: Of an instance: the seconds of its tasks that don't compute, and the others.
        self._held: dict[PrefillInstance, tuple[float, list[Task]]] = {}

    # ---- adding and removing tasks

    def add(self, tasks: Sequence[Task]) -> None:
        """Adds a request's chunks, just sent to their instances."""
        for task in tasks:
            insort(self.ranked, task, key=_rank)
            for request in task.requests:
                self.tasks.setdefault(request.id, []).append(task)
            for member in task.members:
                queue = member.queue
                if len(task.requests) > 1 or (queue and task.rank < queue[-1].rank):
                    self._stale[member] = None
                queue.append(task)
                self._held.pop(member, None)

    def started(self, task: Task, now_s: float) -> None:
        """Notes that the task computes."""
        if task.started_s is None:
            task.started_s = now_s
            self._recount(task)

    def goes_on(self, task: Task, now_s: float) -> None:
        """Notes that a task that another scheduler has started computes, and lets it go on."""
        self.started(task, now_s)
        if not any(one.mask & task.mask for one in self._chosen if one.chosen):
            task.chosen = True
            self._chosen.append(task)

    def suspended(self, task: Task, executed_s: float) -> None:
        """Notes that the task has computed for so long and computes no more for now."""
        task.executed_s, task.started_s = executed_s, None
        self._recount(task)

    def adopted(self, task: Task) -> None:
        """Notes that another scheduler has sent the task: its members may have their tasks in any
        order, so they get one.
        """
        for member in task.members:
            self._stale[member] = None
            self._unordered.add(member)

    def _recount(self, task: Task) -> None:
        for member in task.members:
            self._held.pop(member, None)

    def find(self, request_id: str, chunk_index: int) -> Task | None:
        for task in self.tasks.get(request_id, ()):
            if task.chunk.index == chunk_index or len(task.requests) > 1:
                return task
        return None

    def finish(self, task: Task, request: LiveRequest) -> bool:
        """Notes that the chunk is computed for `request`; True when the whole task is done."""
        if len(task.requests) > 1:
            self.remove(request.id)
            return False
        task.finished = True
        self._drop(task)
        return True

    def remove(self, request_id: str) -> None:
        """Forgets the request's tasks; other requests of a batch continue."""
        tasks = self.tasks.pop(request_id, ())
        for task in tasks:
            head = task.requests[0]
            staying = [r for r in task.requests if r.id != request_id]
            if not staying:
                self._drop(task)
                continue
            task.requests, task.refs = staying, ()
            if head is not staying[0]:
                staying[0].take_over(head)
                self._replace_head(task, head)
        if tasks and len(tasks[0].requests) == 1 and tasks[0].requests[0].id == request_id:
            self._ranking.remove(tasks[0].requests[0])

    def _replace_head(self, task: Task, old: LiveRequest) -> None:
        """Ranks the task by its new head: the old head may come back with its own rank."""
        new = task.requests[0]
        self._unrank(task)
        task.rank = (self._ranking.replace(old, new), new.order, task.chunk.index)
        insort(self.ranked, task, key=_rank)
        self._unsort(task)

    def _unsort(self, task: Task) -> None:
        """Notes that the task may be in a wrong place of its members' queues."""
        for member in task.members:
            if len(member.queue) > 1:
                self._stale[member] = None

    def leave(self, request_id: str, instance: PrefillInstance) -> None:
        """Notes that a member has done its part of the request, which other members still
        compute."""
        for task in self.tasks.get(request_id, ()):
            if instance in task.members:
                task.members = tuple(one for one in task.members if one is not instance)
                task.mask &= ~instance.bit
                instance.queue.remove(task)
                self._held.pop(instance, None)

    def forget(self, instance: PrefillInstance) -> None:
        """Forgets an instance that is gone, after its requests' tasks."""
        self._stale.pop(instance, None)
        self._unordered.discard(instance)
        self._held.pop(instance, None)
        self.everyone &= ~instance.bit

    def _unrank(self, task: Task) -> None:
        del self.ranked[bisect_left(self.ranked, task.rank, key=_rank)]

    def _drop(self, task: Task) -> None:
        self._unrank(task)
        self._recount(task)
        task.chosen = False
        for member in task.members:
            member.queue.remove(task)
        for request in task.requests:
            if (left := self.tasks.get(request.id)) is not None:
                left.remove(task)
                if not left:
                    del self.tasks[request.id]
                    if request is task.requests[0]:
                        self._ranking.remove(request)

    # ---- ranks

    def heads(self) -> list[LiveRequest]:
        """Returns the requests whose keys rank the tasks, each once."""
        return list({task.requests[0].id: task.requests[0] for task in self.ranked}.values())

    def rerank(self, keys: Mapping[str, PriorityKey]) -> None:
        """Gives the tasks whose head is among `keys`, by id, their new keys."""
        changed = [
            (task, key)
            for name, key in keys.items()
            for task in self.tasks.get(name, ())
            if task.requests[0].id == name and task.rank[0] != key
        ]
        if len(changed) * _SORTS_FROM < len(self.ranked):
            for task, key in changed:
                self._move(task, key)
            return
        for task, key in changed:
            task.rank = (key, *task.rank[1:])
        if all(one.rank < other.rank for one, other in pairwise(self.ranked)):
            return
        self.ranked.sort(key=_rank)
        for task in self.ranked:
            self._unsort(task)

    def _move(self, task: Task, key: PriorityKey) -> None:
        before = bisect_left(self.ranked, task.rank, key=_rank)
        del self.ranked[before]
        task.rank = (key, *task.rank[1:])
        after = bisect_left(self.ranked, task.rank, key=_rank)
        self.ranked.insert(after, task)
        if after != before:
            self._unsort(task)

    def rank_by(self, ranking: Ranking, now_s: float) -> None:
        """Ranks all tasks again."""
        self._ranking = ranking
        self.rerank({head.id: ranking.add(head, now_s) for head in self.heads()})

    def has_slot(self, instance: PrefillInstance, rank: Rank, slots: int) -> bool:
        """Returns whether fewer than `slots` of the instance's tasks go before such a request."""
        queue = instance.queue
        if len(queue) < slots:
            return True
        # One that runs, and then as many as would fill the slots: the others rank lower.
        seen = queue if instance in self._stale else islice(queue, slots + 1)
        stays = not self.preemptive
        for task in seen:
            if task.rank < rank or (stays and task.chosen):
                slots -= 1
                if not slots:
                    return False
        return True

    def count_before(self, rank: Rank) -> int:
        """Returns how many tasks go before a request of this rank. Requests with equal numbers meet
        the same queues.
        """
        return bisect_left(self.ranked, rank, key=_rank)

    def queue_s(
        self, instances: Sequence[PrefillInstance], rank: Rank, now_s: float
    ) -> array[float]:
        """Returns the seconds until each instance is free for a request of this rank.

        Only work that goes before it counts, each group starting when its last member is free. With
        preemption a task may be lent a blocked group's member and end earlier than that.
        """
        free_s = dict.fromkeys(instances, 0.0)
        before = self.ranked[: self.count_before(rank)]
        if not self.preemptive:  # a running task is not stopped, whatever its rank
            before = [*self._running(), *(task for task in before if not task.chosen)]
        left_s = [task.remaining_s(now_s) for task in before]
        for task, task_s in zip(before, left_s, strict=True):
            members = task.members  # a member may be draining
            if len(members) == 1:
                free_s[members[0]] = free_s.get(members[0], 0.0) + task_s
                continue
            end_s = max([free_s.get(one, 0.0) for one in members]) + task_s
            for one in members:
                free_s[one] = end_s
        if len(before) < len(self.ranked):
            self._add_yielding(free_s, before, left_s, now_s)
        return array("d", [free_s[one] for one in instances])

    def _add_yielding(
        self,
        free_s: dict[PrefillInstance, float],
        before: list[Task],
        left_s: list[float],
        now_s: float,
    ) -> None:
        """Adds what would yield: what the instances hold in all, less the tasks `before`."""
        counts: dict[PrefillInstance, int] = {}
        seconds: dict[PrefillInstance, float] = {}
        for task, task_s in zip(before, left_s, strict=True):
            for one in task.members:
                counts[one] = counts.get(one, 0) + 1
                seconds[one] = seconds.get(one, 0.0) + task_s
        for one in free_s:
            if len(one.queue) > counts.get(one, 0):
                after_s = self._held_s(one, now_s) - seconds.get(one, 0.0)
                free_s[one] += YIELDING_WEIGHT * max(0.0, after_s)

    def _held_s(self, instance: PrefillInstance, now_s: float) -> float:
        """Returns the seconds of all tasks that the instance holds."""
        kept = self._held.get(instance)
        if kept is None:
            resting = [task for task in instance.queue if task.started_s is None]
            computing = [task for task in instance.queue if task.started_s is not None]
            kept = sum(task.remaining_s(0.0) for task in resting), computing
            self._held[instance] = kept
        return kept[0] + sum(task.remaining_s(now_s) for task in kept[1])

    def ahead_s(self, instance: PrefillInstance, rank: Rank, now_s: float) -> float:
        """Returns the seconds of the tasks that the instance holds and that go before this rank.

        Work of other instances of their groups before these tasks is left out: `queue_s` includes
        it.
        """
        is_sorted, stays = instance not in self._stale, not self.preemptive
        found_s = 0.0
        for index, task in enumerate(instance.queue):
            if task.rank < rank or (stays and task.chosen):
                found_s += task.remaining_s(now_s)
            elif index and is_sorted:
                break
        return found_s

    def instead_of(self, task: Task) -> tuple[str, ...]:
        """Returns the requests that run on the task's members now, by id."""
        others = (one for one in self._chosen if one.chosen and one.mask & task.mask)
        return tuple(one.requests[0].id for one in others if one is not task)

    def _running(self) -> list[Task]:
        """Returns the tasks that run, by rank."""
        return sorted((task for task in self._chosen if task.chosen), key=_rank)

    # ---- which tasks run

    def orders(self) -> list[Order]:
        """Chooses the tasks that run now and returns an order for every instance whose queue must
        change.
        """
        chosen = self._choose()
        for task in chosen:
            for member in task.members:
                if member.queue[0] is not task:
                    self._stale[member] = None
        if not self._stale:
            return []
        running = {member: task for task in chosen for member in task.members}
        orders = []
        for member in self._stale:
            queue, first = member.queue, running.get(member)
            before = list(queue)
            queue.sort(key=_rank)
            if first is not None and queue[0] is not first:
                queue.remove(first)
                queue.insert(0, first)
            is_known = member not in self._unordered
            if queue != before or not is_known or any(len(task.requests) > 1 for task in queue):
                orders.append(_order(member))
        self._stale.clear()
        self._unordered.clear()
        return orders

    def _choose(self) -> list[Task]:
        """Has the best tasks run whose members are free for them. Looks no further than to the one
        that claims the last member.
        """
        claimed = 0
        chosen: list[Task] = []
        if not self.preemptive:
            chosen = self._running()
            for task in chosen:
                claimed |= task.mask
        for task in self.ranked:
            if claimed == self.everyone:
                break
            if task.chosen and not self.preemptive:
                continue
            before = task.previous  # as `ready`, written out: evaluated for every task and round
            if not claimed & task.mask and (before is None or before.finished):
                chosen.append(task)
                claimed |= task.mask
            elif not self.preemptive:
                claimed |= task.mask
        self._choose_no_more(chosen)
        return chosen

    def _choose_no_more(self, chosen: list[Task]) -> None:
        """Has those yield that ran until now and are not among `chosen`."""
        before, self._chosen = self._chosen, chosen
        still = set(chosen)
        for task in before:
            if task.chosen and task not in still:
                task.chosen = False
                self.preemptions += task.started_s is not None
        for task in chosen:
            task.chosen = True


def _order(instance: PrefillInstance) -> Order:
    return Order(
        instance_id=instance.id,
        queue=tuple(task.named() for task in instance.queue),
    )
