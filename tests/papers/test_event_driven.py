"""Event-driven scheduling, FlowPrefill section 5.2, Algorithm 2 and the example of figure 8.

The loop below is Algorithm 2 for one execution slot, written from its lines, over the product's
policies and batching: what it shows is that their order gives the paper's commands.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.batching import batch
from millrace.core.request import Request
from support.priority import ranked, request

MS = 1e-3


@dataclass
class Slot:
    """One instance: a round at every arrival and completion, commands as they are given."""

    policy: str
    budget_tokens: int = 0
    waiting: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    running: Request | None = None
    members: dict[str, list[Request]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    finished_s: dict[str, float] = field(default_factory=dict)
    rounds: int = 0

    def serve(self, requests: list[Request]) -> None:
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

    def suspend(self, task: Request, now_s: float) -> None:
        assert task.running_since_s is not None
        task.executed_s += now_s - task.running_since_s
        task.running_since_s = None
        self.preempted.append(task)
        self.commands.append(f"preempt {task.id}")

    def submit(self, head: Request, candidates: list[Request], now_s: float) -> None:
        members = batch(head, candidates, self.budget_tokens, now_s, lambda n: n * MS)
        self.waiting = [r for r in self.waiting if r not in members]
        head.predicted_prefill_s = sum(r.prompt_tokens for r in members) * MS
        self.members[head.id] = members
        self.commands.append("submit " + "+".join(r.id for r in members))


def of(name: str, arrival_s: float, tokens: int, slo_s: float, order: int = 0) -> Request:
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
    """Lines 13-15: only the waiting ones join; A, which was preempted, is resumed as it was."""
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
    """Section 6: a round is triggered by an arrival or a completion, so 2 a request at most."""
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
