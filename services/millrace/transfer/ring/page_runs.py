"""Runs of whole pages between two pools with pages of equal size: ring blocks and moved history.

Members of a group hold the same heads in pages of the same size; their pools may differ in length.
"""

from __future__ import annotations

import numpy as np

from millrace.core.errors import TransferError
from millrace.core.kv.layout import KvLayout
from millrace.transfer.transport.runs import Offsets, Runs

_ALIKE = (
    *("model_hash", "dtype", "num_layers", "num_kv_heads", "head_dim", "page_tokens"),
    *("head_start", "head_count", "parts", "copies", "layer_start", "model_layers"),
)


def check_alike(ours: KvLayout, theirs: KvLayout, peer: str) -> None:
    """Raises TransferError when our pages and the peer's pages differ in shape."""
    for name in _ALIKE:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            raise TransferError(
                f"{name} of {peer} is {other!r}, ours is {mine!r}; the members of a group need "
                "the same"
            )


def page_runs(
    source: KvLayout, source_pages: Offsets, target: KvLayout, target_pages: Offsets
) -> Runs:
    """Returns runs from each of `source_pages` to each of `target_pages`, from every rank to the
    same rank; coalesced.

    Both are int64 [pages], numbered in a rank's pool of shape [layers * pages, ...]: page ids in
    layer 0.
    """
    runs = Runs(
        source_pages * source.page_bytes,
        target_pages * target.page_bytes,
        np.full(len(source_pages), source.page_bytes, dtype=np.int64),
    ).coalesced()
    ranks = range(source.ranks)
    if len(ranks) == 1:
        return runs
    return runs.repeated(
        [rank * source.part_bytes for rank in ranks], [rank * target.part_bytes for rank in ranks]
    )
