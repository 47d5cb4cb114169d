"""Prefill instances under manual commands: order, gangs, suspension, cancelling, death.

The semantics are those of `core.scheduler.effects`; FlowPrefill sections 5.1 and 6.4 for
suspension.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.cost.operators import BatchShape
from millrace.core.errors import IntegrityError
from millrace.core.request import Chunk, Request
from millrace.core.scheduler import events, reports
from millrace.core.scheduler.effects import CancelOn, ChunkRef, Order, RunPrefill
from millrace.sim.cluster.job import Job
from millrace.sim.cluster.world import World
from millrace.sim.fleet import Fleet
from support.simulation import LAYERS, LINEAR_S, planned, prefill_s, toy_operators, toy_spec


class Bench:
    """A fleet without a machine: commands go in, reports come out with their times."""

    def __init__(self, preemption: str = "operator", **fields) -> None:
        config = SchedulerConfig(preemption=preemption)
        self.world = World(toy_spec(config, **{"prefill": 2, **fields}), None)
        self.fleet = Fleet(self.world)
        self.fleet.start()
        self.said: list[tuple[float, events.Event]] = []

    def tell(self, *effects) -> None:
        commands = [self.fleet.addressed(effect) for effect in effects]
        self.fleet.deliver(commands)
        self._settle()

    def send(self, name: str, *chunks: tuple[int, str], new: int = 1) -> list[RunPrefill]:
        """Sends a request of (tokens, "p0 p1") chunks to all its instances."""
        tokens = sum(size for size, _ in chunks)
        request = Request(id=name, proxy_id="x", prompt_tokens=tokens, max_new_tokens=new)
        self.world.jobs[name] = Job(planned(0, 0.0, tokens, new), request, 0.0)
        made, start = [], 0
        for index, (size, members) in enumerate(chunks):
            ids = tuple(members.split())
            made.append(Chunk(index=index, start_token=start, num_tokens=size, instance_ids=ids))
            start += size
        ids = dict.fromkeys(i for chunk in made for i in chunk.instance_ids)
        return [
            RunPrefill(instance_id=i, request_id=name, chunks=tuple(made), decode_id="d0")
            for i in ids
        ]

    def until(self, time_s: float) -> None:
        self.world.clock.at(time_s, lambda _: None)
        while self.world.clock.next_s is not None and self.world.clock.next_s <= time_s:
            self.world.clock.run_next()
            self._settle()

    def _settle(self) -> None:
        while True:
            self.said += [(self.world.clock.now_s, event) for event in self.world.outbox]
            self.world.outbox.clear()
            if not self.fleet.settle():
                return

    def heard(self, kind: type, name: str | None = None) -> list[tuple[float, reports.Report]]:
        return [(at_s, event.report) for at_s, event in self._reported(kind, name)]

    def reporters(self, kind: type, name: str) -> list[str]:
        """Returns the instances that sent reports of this kind about a request."""
        return [event.instance_id for _, event in self._reported(kind, name)]

    def _reported(self, kind: type, name: str | None) -> Iterator[tuple[float, events.Reported]]:
        for at_s, event in self.said:
            report = event.report if isinstance(event, events.Reported) else None
            if isinstance(report, kind) and name in (None, report.request_id):
                yield at_s, event

    def time_of(self, kind: type, name: str) -> float:
        [(at_s, _)] = self.heard(kind, name)
        return at_s


def _shape(tokens: int) -> BatchShape:
    return BatchShape(prefills=((tokens, 0),))


def refs(*names: str) -> tuple[tuple[ChunkRef, ...], ...]:
    """Returns the queue in "a b+c d.1" style: one entry per name, + batches, .n is a chunk."""
    entries = []
    for entry in names:
        parts = [part.partition(".") for part in entry.split("+")]
        entries.append(
            tuple(
                ChunkRef(request_id=name, chunk_index=int(index or 0)) for name, _, index in parts
            )
        )
    return tuple(entries)


def order(instance_id: str, *names: str) -> Order:
    return Order(instance_id=instance_id, queue=refs(*names))


def cancel(instance_id: str, name: str) -> CancelOn:
    return CancelOn(instance_id=instance_id, request_id=name, reason="test")


def test_an_instance_works_through_its_queue():
    bench = Bench()
    bench.tell(*bench.send("a", (1000, "p0")), *bench.send("b", (500, "p0")))
    bench.until(9.0)
    a_s = prefill_s(1000)
    assert bench.time_of(reports.ChunkStarted, "a") == 0.0
    assert bench.time_of(reports.ChunkFinished, "a") == pytest.approx(a_s)
    assert bench.time_of(reports.ChunkStarted, "b") == pytest.approx(a_s)
    assert bench.time_of(reports.ChunkFinished, "b") == pytest.approx(a_s + prefill_s(500))
    [(_, finished)] = bench.heard(reports.ChunkFinished, "a")
    assert finished.last and finished.compute_s == pytest.approx(a_s)


def test_a_group_starts_when_all_its_members_are_free_and_its_leader_speaks():
    bench = Bench()
    bench.tell(*bench.send("a", (1000, "p1")), *bench.send("g", (4000, "p0 p1")))
    bench.until(9.0)
    start_s = prefill_s(1000)
    assert bench.time_of(reports.ChunkStarted, "g") == pytest.approx(start_s)
    assert bench.time_of(reports.ChunkFinished, "g") == pytest.approx(
        start_s + prefill_s(4000, sp=2)
    )
    assert bench.reporters(reports.ChunkFinished, "g") == ["p0"]
    assert sorted(bench.reporters(reports.RequestReleased, "g")) == ["p0", "p1"]


def test_a_chunk_waits_for_the_one_before_it():
    bench = Bench()
    bench.tell(*bench.send("g", (4000, "p0"), (4000, "p0 p1")))
    bench.until(9.0)
    first_s, second_s = [at_s for at_s, _ in bench.heard(reports.ChunkFinished, "g")]
    assert first_s == pytest.approx(prefill_s(4000))
    added_s = bench.world.tally.balancing_s
    assert added_s > 0.0
    assert second_s == pytest.approx(first_s + prefill_s(4000, 4000, 2) + added_s)
    assert [event.last for _, event in bench.heard(reports.ChunkFinished, "g")] == [False, True]


def test_an_instance_of_a_later_chunk_waits_for_the_earlier_one():
    bench = Bench()
    bench.tell(*bench.send("g", (4000, "p0"), (1000, "p1")))
    bench.until(9.0)
    starts = [at_s for at_s, _ in bench.heard(reports.ChunkStarted, "g")]
    assert starts == pytest.approx([0.0, prefill_s(4000)])


def test_a_group_waits_until_what_runs_at_a_member_has_stopped():
    bench = Bench("layer")
    bench.tell(*bench.send("long", (8000, "p1")))
    bench.until(0.01)
    bench.tell(*bench.send("g", (1000, "p0 p1")), order("p1", "g", "long"))
    bench.until(9.0)
    assert bench.time_of(reports.ChunkStarted, "g") == pytest.approx(prefill_s(8000) / LAYERS)


def test_one_member_alone_can_not_take_a_stop_back():
    bench = Bench("layer")
    bench.tell(*bench.send("g", (20_000, "p0 p1")))
    bench.until(0.01)
    bench.tell(*bench.send("s", (100, "p1")), order("p1", "s", "g"))
    bench.tell(order("p0", "g"))
    bench.until(9.0)
    assert len(bench.heard(reports.ChunkSuspended, "g")) == 1


def test_the_stop_of_a_group_happens_once_it_is_agreed():
    """As by `core.instance.gang`: all members want the group again, and it starts again."""
    bench = Bench("layer")
    bench.tell(*bench.send("g", (20_000, "p0 p1")))
    bench.until(0.01)
    bench.tell(*bench.send("s", (100, "p0")), order("p0", "s", "g"))
    bench.tell(order("p0", "g", "s"))
    bench.until(9.0)
    stop_s = bench.time_of(reports.ChunkSuspended, "g")
    assert [at_s for at_s, _ in bench.heard(reports.ChunkStarted, "g")] == [0.0, stop_s]
    assert bench.time_of(reports.ChunkFinished, "g") <= bench.time_of(reports.ChunkStarted, "s")


def test_whoever_is_at_the_head_runs_and_the_other_goes_on_where_it_stopped():
    bench = Bench()
    bench.tell(*bench.send("long", (10_000, "p0")))
    bench.until(0.1)
    bench.tell(*bench.send("short", (100, "p0")), order("p0", "short", "long"))
    bench.until(9.0)
    stop_s = bench.time_of(reports.ChunkSuspended, "long")
    operators_s = toy_operators().layer_s(_shape(10_000))
    assert 0.1 <= stop_s <= 0.1 + max(operators_s) * 1.01
    [(_, suspended)] = bench.heard(reports.ChunkSuspended, "long")
    assert suspended.compute_s == pytest.approx(stop_s)
    starts = [at_s for at_s, _ in bench.heard(reports.ChunkStarted, "long")]
    assert starts == pytest.approx([0.0, stop_s + prefill_s(100)])
    end_s = bench.time_of(reports.ChunkFinished, "long")
    assert end_s == pytest.approx(prefill_s(10_000) + prefill_s(100))
    blocking = bench.world.tally.blocking
    assert (blocking.count, blocking.max) == (1, pytest.approx(stop_s - 0.1))
    assert bench.world.jobs["long"].suspended_s == pytest.approx(prefill_s(100))


@pytest.mark.parametrize("preemption", ["layer", "chunk", "none"])
def test_coarser_boundaries_stop_later(preemption):
    bench = Bench(preemption, max_chunk_tokens=5000)
    bench.tell(*bench.send("long", (10_000, "p0")))
    bench.until(0.01)
    bench.tell(*bench.send("short", (100, "p0")), order("p0", "short", "long"))
    bench.until(9.0)
    first_pass_s = toy_operators().pass_s(_shape(5000))
    start_s = bench.time_of(reports.ChunkStarted, "short")
    if preemption == "none":
        assert not bench.heard(reports.ChunkSuspended)
        assert start_s == pytest.approx(bench.time_of(reports.ChunkFinished, "long"))
    elif preemption == "chunk":
        assert start_s == pytest.approx(first_pass_s)
    else:
        assert start_s == pytest.approx(first_pass_s / LAYERS)


def test_an_order_taken_back_in_time_stops_nobody():
    bench = Bench("layer")
    bench.tell(*bench.send("long", (10_000, "p0")))
    bench.until(0.01)
    bench.tell(*bench.send("short", (100, "p0")), order("p0", "short", "long"))
    bench.until(0.02)
    bench.tell(order("p0", "long", "short"))
    bench.until(9.0)
    assert not bench.heard(reports.ChunkSuspended)
    assert bench.world.tally.blocking.count == 0
    assert bench.time_of(reports.ChunkFinished, "long") == pytest.approx(prefill_s(10_000))


def test_a_group_stops_as_one_and_needs_all_members_to_go_on():
    bench = Bench()
    bench.tell(*bench.send("g", (20_000, "p0 p1")))
    bench.until(0.05)
    bench.tell(*bench.send("s", (3000, "p1")), order("p1", "s", "g"))
    bench.until(9.0)
    stop_s = bench.time_of(reports.ChunkSuspended, "g")
    resume_s = bench.heard(reports.ChunkStarted, "g")[1][0]
    assert resume_s == pytest.approx(stop_s + prefill_s(3000))
    end_s = bench.time_of(reports.ChunkFinished, "g")
    assert end_s == pytest.approx(prefill_s(20_000, sp=2) + prefill_s(3000))


def test_a_batch_is_computed_at_once_and_reported_one_by_one():
    bench = Bench()
    bench.tell(*bench.send("a", (300, "p0")), *bench.send("b", (200, "p0")), order("p0", "a+b"))
    bench.until(9.0)
    for name in "ab":
        assert bench.time_of(reports.ChunkFinished, name) == pytest.approx(
            bench.fleet.prefill.times.work_s([(300, 0), (200, 0)], 1)
        )
    assert bench.world.tally.chunks == 1


def test_a_waiting_batch_may_be_formed_anew_but_a_begun_one_stays():
    bench = Bench()
    bench.tell(*bench.send("first", (5000, "p0")))
    bench.tell(
        *bench.send("a", (300, "p0")),
        *bench.send("b", (200, "p0")),
        order("p0", "first", "a+b"),
    )
    bench.tell(order("p0", "first", "b", "a"))
    bench.until(prefill_s(5000) + 1e-4)
    assert [event.request_id for _, event in bench.heard(reports.ChunkStarted)] == ["first", "b"]
    bench.until(9.0)
    assert bench.world.tally.chunks == 3


def test_cancelling_what_waits_frees_it_at_once_and_what_runs_at_a_boundary():
    bench = Bench("layer")
    bench.tell(*bench.send("a", (8000, "p0")), *bench.send("b", (500, "p0")))
    bench.until(0.01)
    bench.tell(cancel("p0", "b"))
    assert bench.time_of(reports.RequestReleased, "b") == 0.01
    bench.tell(cancel("p0", "a"))
    assert not bench.heard(reports.RequestReleased, "a")
    bench.until(9.0)
    layer_s = prefill_s(8000) / LAYERS
    assert bench.time_of(reports.RequestReleased, "a") == pytest.approx(layer_s)
    assert not bench.heard(reports.ChunkFinished)
    assert not bench.heard(reports.ChunkSuspended)
    bench.fleet.prefill.check_empty()


def test_cancelling_what_is_not_there_says_nothing():
    bench = Bench()
    bench.tell(cancel("p0", "nobody"))
    assert not bench.said


def test_one_of_a_batch_can_be_cancelled():
    bench = Bench()
    bench.tell(*bench.send("a", (3000, "p0")), *bench.send("b", (200, "p0")), order("p0", "a+b"))
    bench.until(0.01)
    bench.tell(cancel("p0", "a"))
    bench.until(9.0)
    assert not bench.heard(reports.ChunkFinished, "a")
    assert len(bench.heard(reports.ChunkFinished, "b")) == 1
    bench.fleet.prefill.check_empty()


def test_a_member_dies_and_the_group_with_it():
    bench = Bench()
    bench.tell(*bench.send("g", (20_000, "p0 p1")), *bench.send("s", (100, "p0")))
    bench.until(0.05)
    assert bench.fleet.leave("p1")
    bench._settle()
    assert isinstance(bench.said[-1][1], events.InstanceLeft)
    bench.tell(cancel("p0", "g"))
    bench.until(9.0)
    assert bench.time_of(reports.RequestReleased, "g") == 0.05
    assert bench.time_of(reports.ChunkStarted, "s") == 0.05
    assert not bench.heard(reports.ChunkFinished, "g")
    assert not bench.fleet.leave("p1"), "it is dead already"


def test_a_command_for_an_earlier_life_is_lost():
    bench = Bench()
    [late] = [bench.fleet.addressed(effect) for effect in bench.send("a", (100, "p0"))]
    bench.fleet.leave("p0")
    bench.fleet.join("p0")
    bench.fleet.deliver([late])
    bench.until(9.0)
    assert not bench.heard(reports.ChunkStarted)
    assert bench.fleet.prefill.instances["p0"].generation == 2
    assert not late[0].held


def test_a_request_that_is_still_held_must_not_come_again():
    bench = Bench()
    [effect] = bench.send("a", (100, "p0"))
    bench.tell(effect)
    with pytest.raises(IntegrityError, match="still holds"):
        bench.tell(effect)


def test_noise_stretches_compute_but_not_on_average():
    bench = Bench(noise=0.2)
    for index in range(400):
        bench.tell(*bench.send(f"r{index}", (1000, "p0")))
    bench.until(900.0)
    times = [event.compute_s for _, event in bench.heard(reports.ChunkFinished)]
    assert len(set(times)) == 400
    assert sum(times) / 400 == pytest.approx(prefill_s(1000), rel=0.05)


def test_the_feed_forward_part_is_what_balancing_hides_behind():
    times = Bench().fleet.prefill.times
    assert times.feed_forward_s(4000, 0, 4) == pytest.approx(1000 * (LINEAR_S[2] + LINEAR_S[3]))
