"""The thread pool under its callers' uses: several threads at once, fork, many small loops."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from millrace_kernels import api, cpu_backend
from support.deadlines import HANG_S

pytestmark = pytest.mark.skipif(not cpu_backend.AVAILABLE, reason="the C++ module isn't built here")


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_several_python_threads_get_their_own_results():
    weight = torch.randn(600, 256)
    inputs = [torch.randn(2, 256) for _ in range(8)]
    linear = api.prepare_linear(weight)
    expected = [linear(x) for x in inputs]

    def repeat(index: int) -> bool:
        torch.set_num_threads(4)  # torch keeps the count per thread
        return all(torch.equal(linear(inputs[index]), expected[index]) for _ in range(50))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(repeat, range(len(inputs))))


def test_every_loop_runs_every_index():
    x = torch.ones(1, 64)
    for outputs in (*range(1, 300, 7), 5000):
        weight = torch.zeros(outputs, 64)
        weight[:, 5] = torch.arange(outputs)
        assert torch.equal(api.prepare_linear(weight)(x)[0], weight[:, 5])


def test_a_forked_child_gets_its_own_pool():
    script = """
import os, signal, torch
from millrace_kernels import api
torch.set_num_threads(4)
x, linear = torch.ones(1, 512), api.prepare_linear(torch.ones(4000, 512))
linear(x)
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if (linear(x) == 512).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=HANG_S)
