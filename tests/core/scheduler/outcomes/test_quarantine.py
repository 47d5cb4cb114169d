"""One poison request kills no fleet, and costs no other request its answer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from millrace.core.request import MOST_DEATHS, RequestState
from millrace.core.scheduler import effects
from millrace.core.scheduler.fleet.instances import PrefillInstance
from millrace.core.scheduler.fleet.task import Task
from support.core_events import Bench, instance, of

POISON = "poison"


class Fleet:
    """Correct instances, of which every one dies that computes the poison at token `deadly`."""

    def __init__(self, prefills: int, deadly: int) -> None:
        self.names = (f"p{i}" for i in count())
        self.bench = Bench(instance("d0", pages=1000), instance("d1", pages=1000))
        self.deadly = deadly
        self.deaths = 0
        self.ends: dict[str, RequestState] = {}
        for _ in range(prefills):
            self.take(self.bench.step(instance(next(self.names))))

    def take(self, found: list[effects.Effect]) -> None:
        """Drops what is cancelled, and notes the ends."""
        for record in of(effects.Record, found):
            if record.state.is_final:
                self.ends[record.request_id] = record.state
        for cancel in of(effects.CancelOn, found):
            self.take(self.bench.released(cancel.instance_id, cancel.request_id))

    def tasks(self) -> Iterator[Task]:
        """Yields the tasks that run."""
        for one in list(self.bench.machine.cluster.instances.values()):
            if isinstance(one, PrefillInstance):
                yield from (task for task in one.queue if task.chosen and task.members[0] is one)

    def compute(self, task: Task) -> None:
        """Computes a task, and its request to its end."""
        name, bench = task.members[0].id, self.bench
        request = task.requests[0]
        self.take(bench.chunk_started(name, request.id))
        if request.id == POISON and task.chunk.start_token <= self.deadly:
            landed = self.deadly - self.deadly % 64
            if request.decode_id == "d0" and landed:
                self.take(bench.landed(POISON, landed, attempt=request.attempt))
            self.deaths += 1
            self.take(bench.died(name))
            self.take(bench.step(instance(next(self.names))))
            return
        decode = request.decode_id or ""
        self.take(bench.computed(name, request.id))
        self.take(bench.released(name, request.id, complete=True))
        self.take(bench.decoding(decode, request.id))
        self.take(bench.finished(decode, request.id))


@given(
    prefills=st.integers(1, 3),
    before=st.integers(0, 6),
    after=st.integers(0, 6),
    deadly=st.integers(0, 299),
    data=st.data(),
)
def test_a_poison_request_is_failed_and_all_others_finish(
    prefills: int, before: int, after: int, deadly: int, data: st.DataObject
) -> None:
    fleet = Fleet(prefills, deadly)
    others = [f"r{i}" for i in range(before + after)]
    for name in [*others[:before], POISON, *others[before:]]:
        fleet.take(fleet.bench.submit(name, 300))
    while tasks := list(fleet.tasks()):
        fleet.compute(data.draw(st.sampled_from(tasks)))
    assert fleet.ends.pop(POISON) is RequestState.FAILED
    assert fleet.ends == dict.fromkeys(others, RequestState.FINISHED)
    assert fleet.deaths in (MOST_DEATHS, MOST_DEATHS + 1)  # the first may leave progress
    refused = fleet.bench.submit(POISON, 300)
    assert [one.code for one in of(effects.Refuse, refused)] == ["quarantined"]
    for one in fleet.bench.machine.cluster.instances.values():
        assert not one.holdings
