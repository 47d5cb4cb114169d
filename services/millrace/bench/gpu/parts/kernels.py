"""Part *kernels*: every kernel against the float64 reference, by the source tree's own tests."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Final

from millrace.bench.gpu.part import Context

_PLUGINS: Final = ("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout")
"""The plugins of pytest that the tests' settings need. The machine's own may not suit them."""
_QUICK: Final = "test_linear or test_norms_and_silu or test_merging"
"""What the interpreter computes in seconds; the suite has the rest of it."""


def check(context: Context) -> None:
    """On a GPU all comparisons, on the CPU a few in Triton's interpreter, and decode steps by its
    kernels against the float64 reference, on a device that the tests simulate."""
    if importlib.util.find_spec("triton") is None:
        context.found.skipped = "the package triton is not installed"
        return
    quick = [] if context.is_cuda else ["-k", _QUICK]
    compare(context, "triton", "tests/kernels/triton/comparisons.py", *quick)
    if not context.is_cuda:
        steps = "tests/engine/device/graph_steps.py"
        compare(context, "decode steps by triton, in graphs", steps, "-k", "llama")
    elif importlib.util.find_spec("flashinfer"):
        compare(context, "flashinfer", "tests/kernels/test_flashinfer.py", "-m", "gpu")


def compare(context: Context, name: str, *arguments: str) -> None:
    """Runs tests of the source tree and notes their last line."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_PLUGINS, *arguments],
        cwd=context.source,
        env={
            **os.environ,
            "TRITON_INTERPRET": "" if context.is_cuda else "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    lines = ran.stdout.strip().splitlines() or ran.stderr.strip().splitlines() or ["no output"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    context.claim(name, ran.returncode == 0, "; ".join([lines[-1], *failed])[:2000])
