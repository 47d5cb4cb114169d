"""Keeps Python's garbage collector off the objects that a proxy never drops."""

from __future__ import annotations

import ctypes
import gc

#: New objects before they are looked at. Nearly all of a request go by their counts of references:
#: with Python's 700, to look for cycles among them took 4 % of a request's instructions.
_NEW_OBJECTS = 5000

_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE_BYTES = 1 << 20


def spare_old_objects() -> None:
    """Leaves all present objects out of later collections, which get rarer, too. A process calls it
    once it serves.

    Modules, types and the tokenizer's tables are hundreds of thousands of objects. To visit them
    again and again took an eighth of a request's CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


def return_large_blocks() -> None:
    """Lets malloc return blocks of 1 MiB or more to the system when they are freed.

    By itself glibc's malloc keeps blocks for itself that are as large as blocks freed before: the
    text and the body of a long prompt, some 40 MiB in all.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not musl's
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
