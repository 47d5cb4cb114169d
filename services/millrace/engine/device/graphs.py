"""CUDA graphs: work that is enqueued once, and repeated without the host's part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

_T = TypeVar("_T")


class Graph(Generic[_T]):
    """Captured work; `result` has what it returned, in memory that each replay writes again."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: _T) -> None:
        self._graph = graph
        self.result = result

    def replay(self) -> None:
        """Enqueues the work, over the present content of the memory that it reads."""
        self._graph.replay()


class Graphs:
    """Captures graphs that share their memory: a replay overwrites the results of the others."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], _T], *, is_warm: bool = False) -> Graph[_T]:
        """Captures `work`, after a run of it that loads its kernels, unless it `is_warm` already.
        The work must not wait for the device, nor read memory that changes its address. Raises
        RuntimeError where CUDA can't capture it.

        Capture the graph with the most memory first: the others then fit into its memory.
        """
        if not is_warm:
            work()
        torch.cuda.synchronize()  # at start-up: a captured stream must be idle
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
        finally:
            torch.cuda.set_stream(stream)  # which torch does not where a capture fails
        return Graph(graph, result)
