"""Failures of a tensor-parallel group: it ends at once, names the rank, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from millrace.core.errors import ConfigError
from millrace.engine.parallel.commands import CopyPage, Instruction
from millrace.engine.parallel.group_passes import load_ranks
from millrace.engine.parallel.rank_group import RankError, RankGroup
from millrace.engine.runner import Runner
from support.deadlines import HANG_S
from support.parallel import open_runner, split_folder
from support.tiny_engine import Request, prefill
from support.tiny_models import model_folder, prompt

START = Callable[..., RankGroup]


@pytest.fixture
def start() -> Iterator[START]:
    groups: list[RankGroup] = []

    def started(size: int, timeout_s: float = 2 * HANG_S) -> RankGroup:
        groups.append(RankGroup(size, timeout_s=timeout_s))
        return groups[-1]

    yield started
    for group in groups:
        group.close()


def assert_ended(group: RankGroup, runner: Runner, message: str) -> None:
    """No process is left, and every later call raises the same error."""
    assert not any(map(psutil.pid_exists, group.pids))
    with pytest.raises(RankError, match=message):
        prefill(runner, Request(runner, prompt(5)))


def test_a_rank_killed_in_a_pass_is_named_among_those_it_pulls_down(start: START) -> None:
    group = start(4)
    runner = open_runner(group, split_folder("mixtral"))
    other = runner.prefill_batch([Request(runner, prompt(30)).task(0, 30)])
    next(other)
    steps = runner.prefill_batch([Request(runner, prompt(40)).task(0, 40)])
    for _ in range(3):
        next(steps)
    os.kill(group.pids[1], signal.SIGKILL)
    killed_s = time.monotonic()
    message = "tensor parallelism of 4: rank 2 died, killed by SIGKILL"
    with pytest.raises(RankError, match=message):
        list(steps)
    assert time.monotonic() - killed_s < HANG_S
    other.close()  # of a group that has ended: nothing is left to send
    assert_ended(group, runner, message)


def test_a_rank_that_dies_while_nothing_runs_is_told(start: START) -> None:
    group, told = start(2), SimpleQueue[RankError]()
    group.when_died(told.put)
    os.kill(group.pids[0], signal.SIGKILL)
    error = told.get(timeout=HANG_S)
    assert str(error) == "tensor parallelism of 2: rank 1 died, killed by SIGKILL"


def test_a_closed_group_tells_of_no_death(start: START) -> None:
    group, told = start(2), SimpleQueue[RankError]()
    watching = set(threading.enumerate())
    group.when_died(told.put)
    (watcher,) = set(threading.enumerate()) - watching
    group.close()
    watcher.join(HANG_S)
    assert not watcher.is_alive() and told.empty()


def test_a_rank_killed_between_passes_is_named(start: START) -> None:
    group = start(2)
    runner = open_runner(group, split_folder("mixtral"))
    os.kill(group.pids[0], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 died, killed by SIGKILL"):
        prefill(runner, Request(runner, prompt(5)))
    assert_ended(group, runner, "rank 1 died")


def test_a_rank_that_hangs_is_named_after_the_timeout(start: START) -> None:
    group = start(2, timeout_s=2.0)
    runner = open_runner(group, split_folder("mixtral"))
    steps = runner.prefill_batch([Request(runner, prompt(40)).task(0, 40)])
    next(steps)
    os.kill(group.pids[0], signal.SIGSTOP)
    with pytest.raises(RankError, match=r"rank 1 says nothing, \d+ operators into its last pass"):
        list(steps)
    assert_ended(group, runner, "rank 1 says nothing")


def test_a_model_that_can_t_be_split_is_refused_and_a_rank_that_fails_named(start: START) -> None:
    with pytest.raises(ConfigError, match="tensor parallelism is 1; a group has at least 2"):
        RankGroup(1)
    group = start(2)
    with pytest.raises(ConfigError, match="of 2 does not divide num_key_value_heads, which is 3"):
        load_ranks(group, model_folder("qwen3"))
    runner = open_runner(group, split_folder("mixtral"))  # the group is as good as before
    prefill(runner, Request(runner, prompt(5)))
    group.collect()
    group.send(Instruction(CopyPage(0, 10_000)))
    with pytest.raises(RankError, match="rank 1 failed: IndexError"):
        group.collect()
    assert_ended(group, runner, "rank 1 failed")


LEADER = """
import os, signal, sys
from pathlib import Path

import torch

from millrace.core.kv.layout import KvLayout
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.parallel.group_passes import GroupPasses, load_ranks
from millrace.engine.parallel.rank_group import RankGroup

if __name__ == "__main__":
    group = RankGroup(2)
    model = load_ranks(group, Path(sys.argv[1]))
    layout = KvLayout(
        model_hash=model.hash, dtype="float32", num_layers=3, num_kv_heads=4, head_dim=6,
        page_tokens=16, head_start=0, head_count=2, num_pages=4,
    )
    runner = ModelRunner(GroupPasses(group, model, layout))
    task = PrefillTask(token_ids=torch.arange(32), history_tokens=0, pages=[0, 1])
    steps = runner.prefill_batch([task])
    next(steps)  # the other runs ahead, and waits in a collective
    print(*group.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_others_end_when_rank_0_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "leader.py"
    script.write_text(LEADER)
    run = subprocess.run(
        [sys.executable, str(script), str(split_folder("mixtral"))], capture_output=True, text=True
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    pids = [int(pid) for pid in run.stdout.split()]
    deadline_s = time.monotonic() + HANG_S
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert pids and not any(map(psutil.pid_exists, pids))
