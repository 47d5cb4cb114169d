"""Part *kernels*: every kernel against the float64 reference, by the source tree's own tests."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from millrace.bench.gpu import shard
from millrace.bench.gpu.part import Context

_PLAIN: Final = ("-q", "-p", "no:cacheprovider")
_PLUGINS: Final = ("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", shard.__name__)
"""The plugins of pytest that the tests' settings need. The machine's own may not suit them."""
_NO_CPP: Final = "ignore:the CPU kernels in C++ are missing:RuntimeWarning"
"""A machine without a C++ compiler has none, and the tests here need none."""
_QUICK: Final = "test_linear or test_norms_and_silu or test_merging"
"""What the interpreter computes in seconds; the suite has the rest of it."""
_SHARDS: Final = 8
"""Processes that share the tests of Triton's kernels on a GPU. Nearly all of their time the tests
compile: on one core a kernel takes 3 to 9 s."""


def check(context: Context) -> None:
    """On a GPU all comparisons, on the CPU a few in Triton's interpreter, and decode steps by its
    kernels against the float64 reference, on a device that the tests simulate."""
    if importlib.util.find_spec("triton") is None:
        context.found.skipped = "the package triton is not installed"
        return
    triton = "tests/kernels/triton/comparisons.py"
    if not context.is_cuda:
        compare(context, {"triton": start(context, [triton, "-k", _QUICK])})
        steps = ["tests/engine/device/graph_steps.py", "-k", "llama"]
        compare(context, {"decode steps by triton, in graphs": start(context, steps)})
        return
    count = max(1, min(_SHARDS, (os.cpu_count() or 1) - 1))
    started = {
        f"triton, {index + 1} of {count}": start(context, [triton], (index, count))
        for index in range(count)
    }
    if importlib.util.find_spec("flashinfer"):
        started["flashinfer"] = start(context, ["tests/kernels/test_flashinfer.py", "-m", "gpu"])
    compare(context, started)


def compare(context: Context, started: dict[str, subprocess.Popen[str]]) -> None:
    """Waits for runs of tests and notes the last line of each."""
    for name, process in started.items():
        out, error = process.communicate()
        lines = out.strip().splitlines() or error.strip().splitlines() or ["no output"]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        context.claim(name, process.returncode == 0, "; ".join([lines[-1], *failed])[:2000])


def start(
    context: Context, arguments: Sequence[str], part: tuple[int, int] = (0, 1)
) -> subprocess.Popen[str]:
    """Starts tests of the source tree, or every n-th of them: `part` is (which, n)."""
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *_PLAIN, *_PLUGINS, "-W", _NO_CPP, *arguments],
        cwd=context.source,
        env={
            **os.environ,
            "TRITON_INTERPRET": "" if context.is_cuda else "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            shard.VARIABLE: f"{part[0]}/{part[1]}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
