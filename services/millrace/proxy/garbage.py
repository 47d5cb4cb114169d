"""Keeps Python's garbage collector off the objects that a proxy never drops."""

from __future__ import annotations

import ctypes
import gc

_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE_BYTES = 1 << 20


def spare_old_objects() -> None:
    """Leaves all present objects out of later collections. A process calls it once it serves.

    Modules, types and the tokenizer's tables are hundreds of thousands of objects. To visit them
    again and again took an eighth of a request's CPU.
    """
    gc.collect()
    gc.freeze()


def return_large_blocks() -> None:
    """Lets malloc return blocks of 1 MiB or more to the system when they are freed.

    By itself glibc's malloc keeps blocks for itself that are as large as blocks freed before: the
    text and the body of a long prompt, some 40 MiB in all.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not musl's
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
