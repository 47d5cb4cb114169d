"""Describes memory in NIXL's terms."""

from __future__ import annotations

import numpy as np

from millrace.transfer.transport.regions import HOST, Memory
from millrace.transfer.transport.runs import Offsets


def segment(memory: Memory) -> str:
    """Returns NIXL's name of the kind of memory."""
    return "DRAM" if memory.device == HOST else "VRAM"


def descriptor_rows(memory: Memory, starts: Offsets, lengths: Offsets) -> Offsets:
    """Returns int64 [runs, 3]: address, length and device of each run of a region."""
    rows = np.empty((len(starts), 3), dtype=np.int64)
    rows[:, 0] = starts + memory.pointer
    rows[:, 1] = lengths
    rows[:, 2] = max(memory.device, 0)
    return rows
