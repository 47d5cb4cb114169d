"""Event-driven scheduling, FlowPrefill section 5.2, Algorithm 2 and the example of figure 8.

The loop below is Algorithm 2 for one execution slot, written from its lines, over the product's
policies and batching: it shows that their order gives the paper's commands. The same cases then go
through `Machine`, whose commands are `Order`s to an instance that obeys them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.live_request import LiveRequest
from millrace.core.scheduler import events, reports
from millrace.core.scheduler.fleet.batching import batch
from support.core_events import Bench, instance, queues
from support.prefill_fleet import Fleet
from support.priority import ranked, request

MS = 1e-3


@dataclass
class Slot:
    """One instance: a round at every arrival and completion, commands as they are given."""

    policy: str
    budget_tokens: int = 0
    waiting: list[LiveRequest] = field(default_factory=list)
    preempted: list[LiveRequest] = field(default_factory=list)
    running: LiveRequest | None = None
    members: dict[str, list[LiveRequest]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    finished_s: dict[str, float] = field(default_factory=dict)
    rounds: int = 0

    def serve(self, requests: list[LiveRequest]) -> None:
        arrivals = sorted(requests, key=lambda r: (r.arrival_s, r.order))
        now_s = 0.0
        while arrivals or self.running is not None:
            done_s = (
                float("inf") if self.running is None else now_s + self.running.remaining_s(now_s)
            )
            if arrivals and arrivals[0].arrival_s <= done_s:
                now_s = arrivals[0].arrival_s
                self.waiting.append(arrivals.pop(0))
            else:
                now_s = done_s
                self.complete(now_s)
            self.round(now_s)

    def complete(self, now_s: float) -> None:
        assert self.running is not None
        for member in self.members.pop(self.running.id):
            self.finished_s[member.id] = now_s
        self.running = None

    def round(self, now_s: float) -> None:
        self.rounds += 1
        everyone = self.waiting + self.preempted + ([self.running] if self.running else [])
        if not everyone:
            return
        order = ranked(self.policy, everyone, now_s)
        head = order[0]
        if head is self.running:
            return
        if self.running is not None:
            self.suspend(self.running, now_s)
        if head in self.waiting:
            self.submit(head, [r for r in order[1:] if r in self.waiting], now_s)
        else:
            self.preempted.remove(head)
            self.commands.append(f"resume {head.id}")
        head.running_since_s = now_s
        self.running = head

    def suspend(self, task: LiveRequest, now_s: float) -> None:
        assert task.running_since_s is not None
        task.executed_s += now_s - task.running_since_s
        task.running_since_s = None
        self.preempted.append(task)
        self.commands.append(f"preempt {task.id}")

    def submit(self, head: LiveRequest, candidates: list[LiveRequest], now_s: float) -> None:
        members = batch(head, candidates, self.budget_tokens, now_s, lambda n: n * MS)
        self.waiting = [r for r in self.waiting if r not in members]
        head.predicted_prefill_s = sum(r.prompt_tokens for r in members) * MS
        self.members[head.id] = members
        self.commands.append("submit " + "+".join(r.id for r in members))


def of(name: str, arrival_s: float, tokens: int, slo_s: float, order: int = 0) -> LiveRequest:
    return request(
        name,
        arrival_s=arrival_s,
        deadline_s=arrival_s + slo_s,
        tokens=tokens,
        work_s=tokens * MS,
        order=order,
    )


def test_figure_8() -> None:
    """A of low priority runs; B of high priority arrives: submit, preempt, submit, resume."""
    slot = Slot("s_edf")
    slot.serve([of("A", 0.0, 1000, slo_s=5.0), of("B", 0.4, 200, slo_s=0.5, order=1)])
    assert slot.commands == ["submit A", "preempt A", "submit B", "resume A"]
    assert slot.finished_s == pytest.approx({"B": 0.6, "A": 1.2})
    assert slot.rounds == 4  # two arrivals, two completions


def test_nobody_is_preempted_for_a_request_that_is_lost() -> None:
    """S-EDF's foresight: B needs 0.2 s and has 0.1 s. EDF suspends A for it all the same."""
    for policy, commands in (
        ("s_edf", ["submit A", "submit B"]),
        ("d_edf", ["submit A", "preempt A", "submit B", "resume A"]),
        ("edf", ["submit A", "preempt A", "submit B", "resume A"]),
        ("fcfs", ["submit A", "submit B"]),
    ):
        slot = Slot(policy)
        slot.serve([of("A", 0.0, 1000, slo_s=5.0), of("B", 0.4, 200, slo_s=0.1, order=1)])
        assert slot.commands == commands, policy


def test_requests_that_wait_together_are_submitted_together() -> None:
    """Lines 13-15: only the waiting requests join; A, which was preempted, is resumed as it was."""
    slot = Slot("s_edf", budget_tokens=2048)
    slot.serve(
        [
            of("A", 0.0, 1000, slo_s=9.0),
            of("B", 0.1, 400, slo_s=2.0, order=1),
            of("C", 0.2, 100, slo_s=3.0, order=2),
            of("D", 0.3, 100, slo_s=4.0, order=3),
        ]
    )
    assert slot.commands == ["submit A", "preempt A", "submit B", "submit C+D", "resume A"]
    assert slot.finished_s["C"] == slot.finished_s["D"] == pytest.approx(0.7)


traffic = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(1, 1500), st.floats(0.01, 4.0)),
    min_size=1,
    max_size=10,
)


@given(traffic, st.sampled_from(["fcfs", "edf", "d_edf", "s_edf", "lrs", "lars"]), st.booleans())
def test_at_most_two_rounds_a_request_and_everyone_finishes(
    rows: list[tuple[float, int, float]], policy: str, batching: bool
) -> None:
    """Section 6: a round is triggered by an arrival or a completion, so at most 2 per request."""
    requests = [of(f"r{i}", *row, order=i) for i, row in enumerate(rows)]
    slot = Slot(policy, budget_tokens=2048 if batching else 0)
    slot.serve(requests)
    assert set(slot.finished_s) == {r.id for r in requests}
    assert slot.rounds <= 2 * len(requests)
    assert not slot.preempted
    submitted = [c for c in slot.commands if c.startswith("submit")]
    assert "+".join(c.removeprefix("submit ") for c in submitted).count("r") == len(requests)
    last_s = max(slot.finished_s.values())
    busy_s = sum(row[1] for row in rows) * MS  # work is conserved over all switches
    assert busy_s <= last_s + 1e-9
    assert last_s <= max(r.arrival_s for r in requests) + busy_s + 1e-9


# ---- the same through the machine


def served(
    policy: str, arrivals: list[tuple[float, str, int, float]], *, budget_tokens: int = 0
) -> Fleet:
    """One prefill instance; rows: arrival, id, tokens of a millisecond each, TTFT objective."""
    config = SchedulerConfig(
        policy=policy,
        preemption="operator",
        batch_tokens=budget_tokens,
        tasks_ahead=1 if budget_tokens else 2,  # or they were handed over, one by one, at once
    )
    decode = instance("d0", pages=100_000, batch=1000)
    fleet = Fleet(Bench(instance("p0", pages=10_000), decode, config=config), preemptive=True)
    fleet.serve(arrivals)
    return fleet


def test_figure_8_as_orders() -> None:
    bench = Bench(
        instance("p0", pages=1000),
        instance("d0", pages=1000),
        config=SchedulerConfig(policy="s_edf", preemption="operator"),
    )
    submit = bench.submit("A", 1000, ttft_s=5.0)
    assert queues(submit) == {}  # RunPrefill itself is the command to submit
    bench.chunk_started("p0", "A")
    bench.now_s = 0.4
    assert queues(bench.submit("B", 200, ttft_s=0.5)) == {"p0": ["B", "A"]}  # preempt, submit
    bench.suspended("p0", "A", 0.4)
    bench.chunk_started("p0", "B")
    bench.now_s = 0.6
    assert queues(bench.computed("p0", "B")) == {}  # A is next in the queue: it resumes
    (queue,) = (i.queue for i in bench.machine.cluster.instances.values() if i.id == "p0")
    assert [(task.requests[0].id, task.chosen) for task in queue] == [("A", True)]
    bench.chunk_started("p0", "A")
    bench.now_s = 1.2
    bench.computed("p0", "A")
    assert bench.machine.preemptions == 1 and bench.machine.rounds == 3  # none on A's end: no work


def test_figure_8_by_an_instance_that_does_as_it_is_told() -> None:
    fleet = served("s_edf", [(0.0, "A", 1000, 5.0), (0.4, "B", 200, 0.5)])
    assert fleet.commands() == ["submit A", "preempt A", "submit B", "resume A"]
    assert fleet.computed_s == pytest.approx({"B": 0.6, "A": 1.2})


def test_a_resumed_task_is_the_one_that_ranks_first_among_the_suspended() -> None:
    rows = [
        (0.0, "A", 1000, 9.0),
        (0.1, "B", 500, 6.0),
        (0.2, "C", 100, 3.0),
        (0.25, "D", 100, 1.0),
    ]
    fleet = served("s_edf", rows)
    assert fleet.commands()[-3:] == ["resume C", "resume B", "resume A"]
    assert fleet.bench.machine.preemptions == 3


def test_waiting_requests_join_the_head_and_the_preempted_one_resumes_as_it_was() -> None:
    """Lines 13-15 through the machine: with one slot, C and D wait while B computes."""
    rows = [(0.0, "A", 1000, 9.0), (0.1, "B", 400, 2.0), (0.2, "C", 100, 3.0), (0.3, "D", 100, 4.0)]
    fleet = served("s_edf", rows, budget_tokens=2048)
    assert fleet.commands() == ["submit A", "preempt A", "submit B", "submit C+D", "resume A"]
    assert fleet.computed_s["C"] == fleet.computed_s["D"] == pytest.approx(0.7)


@settings(max_examples=30)
@given(traffic, st.sampled_from(["fcfs", "edf", "d_edf", "s_edf", "lrs", "lars", "millrace"]))
def test_the_machine_holds_a_round_at_arrivals_and_completions_only(
    rows: list[tuple[float, int, float]], policy: str
) -> None:
    arrivals = [(at, f"r{i}", tokens, slo_s) for i, (at, tokens, slo_s) in enumerate(rows)]
    fleet = served(policy, arrivals)
    counted = fleet.rounds_for
    assert counted["Submitted"] <= len(rows) and counted["ChunkFinished"] <= len(rows)
    # The paper leaves pages aside: a later request may start when pages are released.
    assert counted["RequestReleased"] <= len(rows)
    assert fleet.bench.machine.rounds <= 2 * len(rows) + counted["RequestReleased"]
    for kind in ("ChunkStarted", "ChunkSuspended", "DecodeStarted", "RequestFinished"):
        assert counted.get(kind, 0) == 0
    assert len(fleet.computed_s) == len(rows)
    busy_s = sum(tokens for _, tokens, _ in rows) * MS
    assert max(fleet.computed_s.values()) <= max(at for at, _, _ in rows) + busy_s + 1e-6


def test_heartbeats_hold_no_round() -> None:
    bench = Bench(instance("p0"), instance("d0"), config=SchedulerConfig(preemption="operator"))
    bench.submit("A", 100)
    before = bench.machine.rounds
    heartbeat = events.Reported(
        instance_id="p0", generation=1, report=reports.Heartbeat(free_pages=9, running=1, waiting=0)
    )
    assert bench.step(heartbeat) == [] and bench.machine.rounds == before
