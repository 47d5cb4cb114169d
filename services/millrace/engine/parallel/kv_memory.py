"""The KV pools of all ranks on the host, one after another in memory that every rank maps.

So rank 0's transport sees all of them as one region. Ranks that hold the same heads share a pool:
they write the same bytes, and no rank begins another pass before all ranks have ended a pass.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import replace

import torch
from torch import Tensor

from millrace.core.errors import CapacityError
from millrace.core.kv.layout import KvLayout
from millrace.engine.model.tp_shard import TpShard


def rank_layouts(layout: KvLayout, ranks: int) -> tuple[KvLayout, ...]:
    """Returns each rank's pool layout, given rank 0's."""
    heads = [TpShard(rank, ranks).kv_heads(layout.num_kv_heads) for rank in range(ranks)]
    return tuple(replace(layout, head_start=h.start, head_count=h.count) for h in heads)


def pools_of(layout: KvLayout) -> int:
    """Returns how many pools like `layout`, a rank's, hold all heads of the model."""
    return layout.num_kv_heads // layout.head_count


def copies_of(layout: KvLayout, ranks: int) -> int:
    """Returns how many neighbouring ranks of `ranks` hold the heads of `layout`, a rank's."""
    return ranks // pools_of(layout)


def pool_number(layout: KvLayout) -> int:
    """Returns the number of a rank's pool."""
    return layout.head_start // layout.head_count


def new_memory(layout: KvLayout) -> int:
    """Returns a file descriptor of zeros for all pools, taken where touched; the caller closes it.

    Raises CapacityError when there is no room.
    """
    nbytes = pools_of(layout) * layout.pool_bytes
    handle = os.memfd_create("millrace-kv")
    try:
        os.ftruncate(handle, nbytes)
    except OSError as error:
        os.close(handle)
        raise CapacityError(f"no room for KV pools of {nbytes} bytes") from error
    return handle


def mapped(layout: KvLayout, handle: int) -> Tensor:
    """Maps [pools, layers, pages, 2, heads, page_tokens, head_dim]; the tensor keeps the memory
    alive.

    A rank's storage is the pool of its `pool_number`.
    """
    count = pools_of(layout)
    memory = mmap.mmap(handle, count * layout.pool_bytes)
    shape = (
        count,
        layout.num_layers,
        layout.num_pages,
        2,
        layout.head_count,
        layout.page_tokens,
        layout.head_dim,
    )
    return torch.frombuffer(memory, dtype=getattr(torch, layout.dtype)).view(shape)
