"""A CUDA graph without a GPU: the captured calls, made again on the same memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from support.fake_tensors import alive, is_tensor, storage_of

INTERPRETS = bool(os.environ.get("TRITON_INTERPRET"))


class Replays(Protocol):
    """The part of a device that graphs need."""

    graphs: list[FakeGraph]

    def replayed(self) -> None:
        """Counts a replay."""


class FakeGraph:
    """`torch.cuda.CUDAGraph`: the operators of a capture, on the same memory. Python does not run
    again. Memory that the capture made is garbage before each replay, as graphs share it; memory
    from before must still have an owner."""

    def __init__(self, device: Replays) -> None:
        self._device = device
        self._calls: list[Callable[[], object]] = []
        self._reads: set[int] = set()
        self._made: dict[int, torch.Tensor] = {}

    def replay(self) -> None:
        device = self._device
        device.replayed()
        owned = {storage_of(tensor.host) for tensor in list(alive.values())}
        assert self._reads <= owned, "a graph reads memory that has no owner any more"
        for graph in device.graphs:
            for made in graph._made.values():
                spoil(made)
        for call in self._calls:
            call()

    def touches(self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """Notes the memory of one captured call."""
        for tensor in inputs:
            if storage_of(tensor) not in self._made:
                self._reads.add(storage_of(tensor))
        for tensor in outputs:
            self._made[storage_of(tensor)] = tensor

    def add(self, call: Callable[[], object]) -> None:
        self._calls.append(call)


def spoil(tensor: torch.Tensor) -> None:
    """Fills memory with what nothing may read: with zeros where kernels compute nothing, whose
    results are read all the same."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan if INTERPRETS else 0.0)
    else:
        tensor.zero_()


def call_again(func: Any, args: Any, kwargs: Any, out: Any, inputs: set[int]) -> Callable[[], None]:
    """Returns a call that computes the operator again, into the memory of its first result."""
    kept = [x if is_tensor(x) and id(x) not in inputs else None for x in tree_leaves(out)]

    def again() -> None:
        for old, new in zip(kept, tree_leaves(func(*args, **kwargs)), strict=True):
            if old is not None:
                old.copy_(new)

    return again
