"""The native calls of a step, recorded once and then made again without Python around them.

What a CUDA graph is on a GPU: the calls find the same memory, and so whatever was put there since.
Python takes more time over a small model's decode step than the kernels it calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

NativeCall = Callable[[], object]


class _Recorder(threading.local):
    calls: list[NativeCall] | None = None


_recorder = _Recorder()


def launch(native: Callable[..., object], *args: object) -> None:
    """Makes a native call on addresses and numbers, and records it where its thread records."""
    native(*args)
    if _recorder.calls is not None:
        _recorder.calls.append(partial(native, *args))


@contextmanager
def record() -> Iterator[list[NativeCall]]:
    """The calls that this thread launches in the block, in their order.

    Made again they give what the block gave, for what lies by then in the memory that it used;
    tables of a plan made in the block are read anew. All that memory is the caller's to keep. Only
    C++ launches: attention plans and their runs, `rope_write_kv`, linears; whatever else the block
    did is missing, so the caller counts.
    """
    before, _recorder.calls = _recorder.calls, []
    try:
        yield _recorder.calls
    finally:
        _recorder.calls = before
