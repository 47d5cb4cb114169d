"""Host memory for the KV of preempted sequences: whole pages, of all layers and ranks.

Members with pools of their own, ranks and stages, have buffers of their own, with the same slots.

A slot of the buffer holds one page. Runs of neighbouring pages that lie in neighbouring slots are
one copy per layer. On CUDA the memory is pinned and copies run on a stream of their own, beside
decode steps; on the host they are plain copies.

One thread owns the table of slots; another thread copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from millrace.core.errors import CapacityError, IntegrityError
from millrace.engine.kv.host_memory import host_zeros
from millrace.engine.kv.pool import PageExtents, page_runs

_Copy = Callable[[Sequence[int], Sequence[int]], None]
_PAGE_DIMS: Final = 5  # of a page among others: [pages, 2, heads, page_tokens, head_dim]


class MemberBuffers(Protocol):
    """The other members' `SwapBuffer`s; `engine.parallel.member_calls.MemberCalls`."""

    def begin(self, method: str, *arguments: Any) -> None: ...  # noqa: ANN401
    def collect(self) -> list[Any]: ...


class KvSwap:
    """`swap_out` and `swap_in` block, on any thread, one at a time; all else is for the owner
    thread.
    """

    def __init__(
        self,
        storage: Tensor,
        swap_bytes: int,
        page_bytes: int,
        others: MemberBuffers | None = None,
    ) -> None:
        """`storage`: the KV of an engine, [..., pages, 2, heads, page_tokens, head_dim]; with
        `others`, the leader's alone. `page_bytes`: of a page in the pools of all members.

        Raises CapacityError when the host lacks the memory, EngineDied when another member does.
        """
        self.page_bytes = page_bytes
        self.num_pages = swap_bytes // self.page_bytes
        self._free = PageExtents(self.num_pages)
        self._others = others
        self._buffer = SwapBuffer(storage, self.num_pages)
        if others is not None:
            others.begin("open", self.num_pages)
            others.collect()

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
        self._at_all(self._buffer.swap_out, pages, slots)

    def swap_in(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copies slots to pages, in this order; returns when both may be used."""
        self._at_all(self._buffer.swap_in, slots, pages)

    def check_integrity(self, expected_used: int | None = None) -> None:
        """Raises IntegrityError when slots are lost, or their use differs from expected."""
        self._free.check()
        used = self.num_pages - self._free.num_pages
        if expected_used is not None and used != expected_used:
            raise IntegrityError(f"{used} pages of swap are in use, {expected_used} should be")

    def _at_all(self, copy: _Copy, source: Sequence[int], target: Sequence[int]) -> None:
        if self._others is not None:
            self._others.begin(copy.__name__, source, target)
        copy(source, target)
        if self._others is not None:
            self._others.collect()


class SwapBuffer:
    """The buffer of the pools in one process. One thread at a time copies."""

    def __init__(self, storage: Tensor, num_pages: int) -> None:
        """`storage`: as of `KvSwap`. Raises CapacityError when the host lacks the memory."""
        self._layers_lpx = _pages_first(storage)
        self._stream: torch.cuda.Stream | None = None
        layers, _, elements = self._layers_lpx.shape
        try:
            self._host_lpx = self._allocate((layers, num_pages, elements), storage)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"engine.swap_bytes asks for {num_pages} pages; the host has no room for them"
            ) from error

    def swap_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """`KvSwap.swap_out`."""
        self._copy(self._layers_lpx, pages, self._host_lpx, slots)

    def swap_in(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """`KvSwap.swap_in`."""
        self._copy(self._host_lpx, slots, self._layers_lpx, pages)

    def _allocate(self, shape: tuple[int, int, int], storage: Tensor) -> Tensor:
        if storage.device.type == "cpu":
            return host_zeros(shape, storage.dtype)
        self._stream = torch.cuda.Stream(storage.device)  # type: ignore[no-untyped-call] # torch's
        return torch.empty(shape, dtype=storage.dtype, pin_memory=shape[1] > 0)

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


def _pages_first(storage: Tensor) -> Tensor:
    """Returns a view [layers of all pools, pages, elements of a page]."""
    return storage.flatten(0, storage.dim() - _PAGE_DIMS - 1).flatten(2)


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
