"""Memory that a proxy has used for a long prompt goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

#: Frees a block of 24 MiB, by which malloc learns to keep the next ones, then 40 of 4 MiB between
#: small ones that stay. Prints the MiB that have stayed.
PROGRAM = """
import sys
from millrace.proxy.garbage import return_large_blocks
if sys.argv[1] == "with":
    return_large_blocks()
bytes(24 << 20)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
before = resident()
blocks, small = [], []
for _ in range(40):
    blocks.append(b"x" * (4 << 20))
    small.append(b"y" * 2000)
del blocks
print(resident() - before)
"""


def kept_mib(how: str) -> float:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    return float(found.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="malloc is not glibc's")
def test_large_blocks_go_back_to_the_system() -> None:
    assert kept_mib("with") < 4
    assert kept_mib("without") > 8  # or the call is needed no more
