"""What an event costs while many requests wait, counted in looks at requests and at tasks."""

from __future__ import annotations

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.live_request import LiveRequest
from millrace.core.priority.millrace.policy import MOST, MOVES
from millrace.core.scheduler import reports
from millrace.core.scheduler.fleet.run_queue import RunQueue
from millrace.core.scheduler.fleet.task import Task
from millrace.core.scheduler.fleet.waiting_queue import WaitingQueue
from millrace.core.scheduler.machine import Machine
from support.core_events import instance, reported, request

INSTANCES = 4


class Work:
    """Counts, since `clear`, looks at requests and tasks, and moves in queues."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.requests = self.tasks = self.moves = 0
        look, remaining_s = LiveRequest.remaining_s, Task.remaining_s
        rerank, slot = WaitingQueue.rerank, RunQueue.has_slot

        def looking(one: LiveRequest, now_s: float) -> float:
            self.requests += 1
            return look(one, now_s)

        def remaining(one: Task, now_s: float) -> float:
            self.tasks += 1
            return remaining_s(one, now_s)

        def moving(line: WaitingQueue, keys) -> None:
            self.moves += len(keys)
            rerank(line, keys)

        def slots(line: RunQueue, *given) -> bool:
            self.tasks += 1
            return slot(line, *given)

        patch.setattr(LiveRequest, "remaining_s", looking)
        patch.setattr(Task, "remaining_s", remaining)
        patch.setattr(WaitingQueue, "rerank", moving)
        patch.setattr(RunQueue, "has_slot", slots)

    def clear(self) -> None:
        self.requests = self.tasks = self.moves = 0


def crowded(count: int, *, decode_pages: int) -> Machine:
    """A machine where `count` requests wait: some in time, some late, some without objective."""
    machine = Machine(SchedulerConfig(max_queue_requests=10**6, max_queue_s=1e9))
    for name in (*(f"p{number}" for number in range(INSTANCES)), "d0"):
        pages = decode_pages if name == "d0" else 1000
        machine.step(instance(name, pages=pages, batch=10**6), 0.0)
    for number in range(count):
        ttft_s = (0.1, 5.0, 1e4, None)[number % 4]
        one = request(
            f"r{number}", 50 + 10 * (number % 40), ttft_s=ttft_s, slo_class=f"c{number % 3}"
        )
        machine.step(one, 0.0)
    return machine


@pytest.mark.parametrize("decode_pages", [10**7, 200], ids=["for prefill", "for decode"])
@pytest.mark.parametrize("count", [200, 1000])
def test_an_event_costs_the_same_however_many_wait(
    count: int, decode_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = crowded(count, decode_pages=decode_pages)
    assert machine.queued > 0.9 * count - 4 * INSTANCES
    work = Work(monkeypatch)
    for number in range(200):
        now_s = 0.05 * number
        work.clear()
        machine.step(request(f"n{number}", 100, arrival_s=now_s, ttft_s=3.0), now_s)
        assert work.requests <= 2 * (3 * MOST + MOVES) + 4  # in the two queues
        assert work.moves <= 2 * 3 * MOVES
        assert work.tasks <= 50 * INSTANCES
    machine.check_integrity()


def test_reports_that_change_no_order_look_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = crowded(500, decode_pages=10**7)
    work = Work(monkeypatch)
    beat = reports.Heartbeat(running=1, waiting=0, free_pages=10)
    for name in ("p0", "d0"):
        machine.step(reported(name, beat), 1.0)
    first = next(one for one in machine.requests.values() if one.chunks)
    leader = first.chunks[0].instance_ids[0]
    started = reports.ChunkStarted(request_id=first.id, chunk_index=0)
    machine.step(reported(leader, started), 1.0)
    assert (work.requests, work.tasks, work.moves) == (0, 0, 0)
