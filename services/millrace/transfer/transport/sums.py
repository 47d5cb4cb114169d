"""crc32c of runs of bytes in host memory."""

from __future__ import annotations

import crc32c
import numpy as np

from millrace.transfer.transport.regions import Memory, copy_on_host, host_bytes
from millrace.transfer.transport.runs import Runs

#: Runs of this many bytes are summed where they lie; shorter runs are copied together first.
_IN_PLACE_BYTES = 2048


def crc_of(memory: Memory, runs: Runs, value: int = 0) -> int:
    """Returns the crc32c, begun at `value`, of the bytes at the runs' sources, in their order.

    Raises ValueError for runs that leave the memory, and for memory of a device.
    """
    runs.check_within(memory.nbytes, np.iinfo(np.int64).max)
    if runs.total_bytes < _IN_PLACE_BYTES * len(runs):
        together = np.empty(runs.total_bytes, dtype=np.uint8)
        ends = np.cumsum(runs.length)
        copy_on_host(
            memory,
            Memory.of_array(together),
            Runs(runs.source, ends - runs.length, runs.length),
        )
        return crc32c.crc32c(together.data, value)
    found = host_bytes(memory).data
    for start, length in zip(runs.source.tolist(), runs.length.tolist(), strict=True):
        value = crc32c.crc32c(found[start : start + length], value)
    return value
