"""Runs `comparisons.py` in processes of its own: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton (extra `gpu`) isn't installed")

COMPARISONS = Path(__file__).with_name("comparisons.py")


def compare(environment: dict[str, str]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(COMPARISONS)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]


def test_in_the_interpreter():
    compare({"TRITON_INTERPRET": "1"})


@pytest.mark.gpu
def test_on_a_device():
    compare({"TRITON_INTERPRET": ""})
