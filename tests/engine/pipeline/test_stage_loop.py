"""Passes that are suspended in a later stage, for other passes or for none."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.pipeline.messages import Drop
from support.deadlines import HANG_S
from support.ring_group import RingGroup, plan
from support.staged import Staged
from support.tiny_engine import Request, make_runner, prefill
from support.tiny_models import prompt


def test_a_pass_given_up_where_it_was_just_handed_on_leaves_nothing_behind(
    five_layers, staged
) -> None:
    """The next stage, which gets the drop command, still takes the rows that are to come."""
    one = staged(five_layers, 3)
    loop, arrive = one.loops[0], one.rows[1].on_rows
    handed_on, gate = threading.Event(), threading.Event()

    def stalled(handed) -> None:
        handed_on.set()
        threading.Thread(target=lambda: (gate.wait(HANG_S), arrive(handed)), daemon=True).start()

    one.rows[1].on_rows = stalled
    run, send, dropped = one.passes[1].run, loop.send, threading.Event()

    def sent(command) -> None:
        send(command)
        if isinstance(command, Drop):
            dropped.set()

    def watched(tables, **arguments):
        for boundary in run(tables, **arguments):
            assert not handed_on.is_set() or dropped.wait(HANG_S)
            yield boundary

    one.passes[1].run, loop.send = watched, sent
    task = Request(one.runner, prompt(40)).task(0, 40)
    task.name = "given up"
    steps = one.runner.prefill_batch([task])
    assert any(boundary.awaited for boundary in steps) and handed_on.wait(HANG_S)
    one.runner.in_flight.drop(["given up"])
    steps.close()
    gate.set()
    one.check_settled()


@pytest.fixture
def impatient() -> Iterator[list[RankGroup]]:
    groups = [RankGroup(2, timeout_s=2.0) for _ in range(2)]
    yield groups
    for group in groups:
        group.close()


def test_ranks_of_a_stage_wait_for_nobody_while_a_ring_stands_still(five_layers, impatient) -> None:
    """Left after an operator whose next operator ends with a collective."""
    one, wanted = Staged(five_layers, 2, groups=impatient), make_runner(five_layers)
    try:
        group = RingGroup(
            [one.runner],
            plan(random.Random(1), 30, (1,)),
            prompt(30),
            max_chunk_tokens=64,
            rng=random.Random(1),
        )
        ring, tasks = group.ring(group.layout.chunks[0])
        ring.tasks.append(tasks[0])
        (task,) = tasks[0]
        task.want_logits = True
        for boundary in one.runner.prefill_ring(task):
            if boundary.operator == "gate_up_proj" and boundary.layer in (0, 3):
                one.runner.rest()
                time.sleep(3.5)
        logits = prefill(wanted, Request(wanted, prompt(30)))
        torch.testing.assert_close(task.logits, logits, rtol=1e-4, atol=1e-4)
        one.check_settled()
    finally:
        one.close()
