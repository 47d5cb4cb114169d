"""Host memory for the KV of preempted sequences: whole pages, of all layers and ranks.

A slot of the buffer holds one page. Runs of neighbouring pages that lie in neighbouring slots are
one copy per layer. On CUDA the memory is pinned and copies run on a stream of their own, beside
decode steps; on the host they are plain copies.

One thread owns the table of slots; another thread copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from millrace.core.errors import CapacityError, IntegrityError
from millrace.core.kv.layout import KvLayout
from millrace.engine.kv.host_memory import host_zeros
from millrace.engine.kv.pool import PageExtents, page_runs

_PAGE_DIMS: Final = 5  # of a page among others: [pages, 2, heads, page_tokens, head_dim]


class KvSwap:
    """`swap_out` and `swap_in` block, on any thread, one at a time; all else is for the owner
    thread.
    """

    def __init__(self, storage: Tensor, layout: KvLayout, swap_bytes: int) -> None:
        """`storage`: the KV of an engine, [..., pages, 2, heads, page_tokens, head_dim].

        The swap has no room at all where `storage` is not all of the layout: on CUDA the storage of
        a group of ranks is rank 0's alone. Raises CapacityError when the host lacks the memory.
        """
        self._layers_lpx = storage.flatten(0, storage.dim() - _PAGE_DIMS - 1).flatten(2)
        layers, _, elements = self._layers_lpx.shape
        self.page_bytes = layers * elements * storage.element_size()
        whole = storage.numel() * storage.element_size() >= layout.pool_bytes
        self.num_pages = swap_bytes // self.page_bytes if whole else 0
        self._free = PageExtents(self.num_pages)
        self._stream: torch.cuda.Stream | None = None
        shape = (layers, self.num_pages, elements)
        try:
            self._host_lpx = self._allocate(shape, storage)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"engine.swap_bytes is {swap_bytes}; the host has no room for it"
            ) from error

    @property
    def free_pages(self) -> int:
        return self._free.num_pages

    @property
    def used_bytes(self) -> int:
        return (self.num_pages - self._free.num_pages) * self.page_bytes

    def reserve(self, count: int) -> list[int]:
        """Reserves `count` slots, ascending.

        Raises CapacityError, and takes nothing, without room.
        """
        if count > self._free.num_pages:
            raise CapacityError(f"{count} pages of swap wanted, {self._free.num_pages} are free")
        return self._free.take(count)

    def release(self, slots: Sequence[int]) -> None:
        """Frees the slots; their content is not wanted any more."""
        for start, length in page_runs(sorted(slots)):
            self._free.add_run(start, length)

    def swap_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copies pages to slots, in this order; returns when the pages may be reused."""
        self._copy(self._layers_lpx, pages, self._host_lpx, slots)

    def swap_in(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copies slots to pages, in this order; returns when both may be used."""
        self._copy(self._host_lpx, slots, self._layers_lpx, pages)

    def check_integrity(self, expected_used: int | None = None) -> None:
        """Raises IntegrityError when slots are lost, or their use differs from expected."""
        self._free.check()
        used = self.num_pages - self._free.num_pages
        if expected_used is not None and used != expected_used:
            raise IntegrityError(f"{used} pages of swap are in use, {expected_used} should be")

    def _allocate(self, shape: tuple[int, int, int], storage: Tensor) -> Tensor:
        if storage.device.type == "cpu":
            return host_zeros(shape, storage.dtype)
        self._stream = torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call] # torch's
        return torch.empty(shape, dtype=storage.dtype, pin_memory=self.num_pages > 0)

    def _copy(
        self, source_lpx: Tensor, origin: Sequence[int], target_lpx: Tensor, goal: Sequence[int]
    ) -> None:
        runs = _common_runs(origin, goal)
        if self._stream is None:
            _copy_runs(source_lpx, target_lpx, runs)
            return
        # Earlier steps wrote the KV on the default stream, and later steps read it there.
        self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            _copy_runs(source_lpx, target_lpx, runs)
        self._stream.synchronize()


def _common_runs(origin: Sequence[int], goal: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns (first of `origin`, first of `goal`, length) of runs contiguous in both."""
    runs: list[tuple[int, int, int]] = []
    for one, other in zip(origin, goal, strict=True):
        if runs:
            start, to, length = runs[-1]
            if (one, other) == (start + length, to + length):
                runs[-1] = (start, to, length + 1)
                continue
        runs.append((one, other, 1))
    return runs


def _copy_runs(
    source_lpx: Tensor, target_lpx: Tensor, runs: Sequence[tuple[int, int, int]]
) -> None:
    for source_px, target_px in zip(source_lpx, target_lpx, strict=True):
        for start, to, length in runs:
            target_px[to : to + length].copy_(source_px[start : start + length], non_blocking=True)
