"""The committed stubs equal the stubs that proto/ generates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_stubs_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "proto" / "generate.py", "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
