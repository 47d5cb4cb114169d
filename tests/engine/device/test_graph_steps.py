"""Runs `graph_steps.py` and `prefill_steps.py` in processes of their own, in Triton's
interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton (extra `gpu`) isn't installed")


@pytest.mark.parametrize(
    ("file", "checks_of"),
    [
        ("graph_steps.py", "mistral or fits_no_graph"),
        pytest.param("graph_steps.py", "llama or qwen3_moe", marks=pytest.mark.slow),
        ("prefill_steps.py", "mistral or turns or answers or kv"),
        pytest.param("prefill_steps.py", "llama or qwen3_moe or suspended", marks=pytest.mark.slow),
    ],
)
def test_in_the_interpreter(file: str, checks_of: str):
    checks = Path(__file__).with_name(file)
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            checks_of,
            str(checks),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
