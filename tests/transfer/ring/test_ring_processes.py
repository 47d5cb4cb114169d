"""Members as real processes over NIXL: bytes, aborts in the middle, a killed and a stopped
member.
"""

from __future__ import annotations

import random
import signal
import time

import pytest

from millrace.core.config import TransferConfig
from support.deadlines import HANG_S
from transfer.ring.ring_children import Processes
from transfer.ring.ring_nodes import chunks_of, pool_layout

NAMES = ("a", "b", "c", "d")
CONFIG = TransferConfig(lease_s=1.0)


@pytest.fixture(scope="module")
def processes():
    layouts = {name: pool_layout(pages=400 + 9 * at) for at, name in enumerate(NAMES)}
    made = Processes(layouts, CONFIG)
    yield made
    made.end()


def finish(processes, request_id, members) -> None:
    for done, wrong, _ in processes.ask(members, "close", request_id).values():
        assert done and not wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_blocks_and_history(processes, size):
    chunks = chunks_of([37, 120, 61], [NAMES[:1], NAMES[:size], NAMES[:size]])
    finish(processes, f"r{size}", processes.start(f"r{size}", chunks, size, pause_s=0.001))
    processes.check(NAMES)


def test_groups_that_overlap_work_at_once(processes):
    one = processes.start("o1", chunks_of([40, 90], [NAMES[:2], NAMES]), 1, pause_s=0.001)
    two = processes.start("o2", chunks_of([130], [("c", "b")]), 2, pause_s=0.001)
    finish(processes, "o1", one)
    finish(processes, "o2", two)
    processes.check(NAMES)


def test_aborts_at_any_point(processes):
    rng = random.Random(1)
    for number in range(8):
        request_id = f"x{number}"
        members = processes.start(
            request_id, chunks_of([33, 150], [NAMES[:2], NAMES[: 2 + number % 3]]), number, 0.001
        )
        time.sleep(rng.random() * 0.08)
        processes.ask([rng.choice(members)], "abort", request_id)
        for _, wrong, took_s in processes.ask(members, "close", request_id).values():
            assert not wrong and took_s < HANG_S
        processes.check(NAMES)


def test_a_member_that_was_killed():
    """Waits end with `abort`; closing waits for the grace where the dead member could write."""
    processes = Processes({name: pool_layout(pages=400) for name in NAMES[:3]}, CONFIG)
    try:
        processes.start("k", chunks_of([600], [NAMES[:3]]), 1, pause_s=0.01)
        processes.all["b"].signal(signal.SIGKILL)
        processes.ask("ac", "abort", "k")
        assert processes.ask("ac", "wait", "k", 1.0) == {"a": True, "c": True}
        ends = processes.ask("ac", "close", "k")
        assert not any(done or wrong for done, wrong, _ in ends.values())
        assert 1.0 <= ends["c"][2] < HANG_S and ends["a"][2] < HANG_S
        processes.check("ac")
    finally:
        processes.end()


@pytest.mark.slow
def test_a_member_that_was_stopped_holds_the_pages_until_it_goes_on():
    processes = Processes({name: pool_layout(pages=400) for name in NAMES[:3]}, CONFIG)
    try:
        processes.start("s", chunks_of([600], [NAMES[:3]]), 1, pause_s=0.01)
        processes.all["b"].signal(signal.SIGSTOP)
        processes.ask("ac", "abort", "s")
        assert processes.ask("ac", "wait", "s", 1.0) == {"a": True, "c": True}
        for name in "ac":
            processes.all[name].send(("close", "s"))
        assert not processes.all["c"].pipe.poll(3.5)  # lease and grace have passed
        processes.all["b"].signal(signal.SIGCONT)
        for name in "ac":
            done, wrong, _ = processes.all[name].receive()
            assert not done and not wrong
        done, wrong, _ = processes.ask("b", "close", "s")["b"]
        assert not done and not wrong
        processes.check(NAMES[:3])
    finally:
        processes.end()
