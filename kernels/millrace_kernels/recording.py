"""Records the native calls of a step, and replays them without Python in between.

It works as a CUDA graph on a GPU: the calls use the same memory with its present content. Python
takes more time over a small model's decode step than the kernels that it calls.
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
    """Records the calls that this thread launches in the block, in their order.

    A replay computes the block again with the present content of its memory; tables of a plan made
    in the block are read again. The caller keeps all that memory alive. Only C++ launches are
    recorded: attention plans and their runs, `rope_write_kv`, linears; other work of the block is
    missing, so the caller counts the calls.
    """
    before, _recorder.calls = _recorder.calls, []
    try:
        yield _recorder.calls
    finally:
        _recorder.calls = before
