"""KV pools of ranks on the host, in memory that rank 0 maps too: one process can send them all."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.core.errors import CapacityError
from millrace.core.kv_layout import KvLayout


@dataclass(frozen=True, slots=True, eq=False)
class RankPool:
    """What a transport needs to read a rank's pool: storage, shaped as `KvLayout` says."""

    layout: KvLayout
    storage: Tensor


def new_memory(layout: KvLayout) -> int:
    """A file descriptor of zeros for a pool, taken where touched; the caller closes it.

    Raises CapacityError when there is no room.
    """
    handle = os.memfd_create("millrace-kv")
    try:
        os.ftruncate(handle, layout.pool_bytes)
    except OSError as error:
        os.close(handle)
        raise CapacityError(f"no room for a KV pool of {layout.pool_bytes} bytes") from error
    return handle


def mapped(layout: KvLayout, handle: int) -> Tensor:
    """The pool's storage in that memory, shared with all who map it; the tensor keeps it alive."""
    memory = mmap.mmap(handle, layout.pool_bytes)
    shape = (
        layout.num_layers,
        layout.num_pages,
        2,
        layout.head_count,
        layout.page_tokens,
        layout.head_dim,
    )
    return torch.frombuffer(memory, dtype=getattr(torch, layout.dtype)).view(shape)
