from __future__ import annotations

import gc
import mmap
import weakref
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from millrace.core.kv.layout import KvLayout
from millrace.engine.kv.host_memory import HUGE_PAGE_BYTES, host_zeros
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.loader import load_model
from support.tiny_models import model_folder


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (3, 1 << 20, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_it_is_a_plain_tensor_of_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    zeros = host_zeros(shape, dtype)
    assert zeros.shape == shape and zeros.dtype == dtype and zeros.is_contiguous()
    assert not zeros.count_nonzero()
    zeros.fill_(3)
    assert bool((zeros == 3).all())


def test_large_tensors_start_on_a_huge_page() -> None:
    assert host_zeros((3 * HUGE_PAGE_BYTES,), torch.uint8).data_ptr() % HUGE_PAGE_BYTES == 0


def test_a_view_keeps_the_memory_and_its_end_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = []

    class Map(mmap.mmap):
        """A mapping to which weak references can point."""

    def mapped(fileno: int, nbytes: int, flags: int) -> Map:
        maps.append(weakref.ref(memory := Map(fileno, nbytes, flags)))
        return memory

    monkeypatch.setattr(mmap, "mmap", mapped)
    view = host_zeros((4, HUGE_PAGE_BYTES), torch.uint8)[2, 5:]
    gc.collect()
    assert maps[0]() is not None
    view.fill_(1)
    del view
    gc.collect()
    assert maps[0]() is None


def test_memory_is_taken_where_it_is_touched() -> None:
    before = resident_bytes()
    zeros = host_zeros((1 << 30,), torch.uint8)
    zeros[:: 256 << 20] = 1
    assert resident_bytes() - before <= 4 * HUGE_PAGE_BYTES + (1 << 20)


def test_more_than_there_is_is_refused() -> None:
    for elements in (1 << 60, 1 << 64):
        with pytest.raises(MemoryError, match="no room for"):
            host_zeros((elements,), torch.float32)


def test_a_mostly_unused_pool_takes_little() -> None:
    """A layer's pages lie together, so few pages in use touch a huge page or two per layer."""
    layout = KvLayout(
        model_hash="m",
        dtype="bfloat16",
        num_layers=12,
        num_kv_heads=4,
        head_dim=64,
        page_tokens=16,
        head_start=0,
        head_count=4,
        num_pages=8192,
    )
    before = resident_bytes()
    pool = KvPool(layout)
    for page in pool.allocate(64):
        for layer in range(layout.num_layers):
            pool.layer(layer)[page] = 1
    used = 64 * layout.pool_bytes // layout.num_pages
    most = used + 12 * 2 * HUGE_PAGE_BYTES
    assert resident_bytes() - before <= most < layout.pool_bytes // 20


def test_a_models_weights_are_one_piece_of_such_memory() -> None:
    weights = load_model(model_folder("llama"), device="cpu").weights
    held = [weights.embedding, weights.final_norm]
    for layer in weights.layers:
        held += [t for f in fields(layer) if (t := getattr(layer, f.name)) is not None]
    assert len({t.untyped_storage().data_ptr() for t in held}) == 1
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in held)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
