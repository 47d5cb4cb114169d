"""The collectives of one rank, over torch.distributed: gloo between hosts' memory, NCCL on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

# torch.distributed exports these too, without types.
from torch._C._distributed_c10d import (
    BroadcastOptions,
    FileStore,
    GatherOptions,
    ProcessGroupGloo,
    Store,
)
from torch.nn.functional import pad

from millrace.core.arithmetic import ceil_div
from millrace_kernels.linear import Linear

_LOOPBACK = "127.0.0.1"
_FOR_EVER = timedelta(days=365)


class PeerLost(Exception):
    """A collective did not end, because another rank was gone or late."""


class Communicator:
    """One rank's end. All ranks make the same calls in the same order.

    Each call ends within `timeout_s`, with PeerLost where a rank is missing; on CUDA the call has
    only been enqueued when it returns. Sums are the same to the bit on every rank.
    """

    def __init__(
        self, rank: int, size: int, *, device: torch.device, rendezvous: str, timeout_s: float
    ) -> None:
        """Waits for all `size` ranks.

        `rendezvous`: the path of a file that no earlier group has used.
        """
        self.rank = rank
        self.size = size
        store = FileStore(rendezvous, size)
        with _as_peer_lost():
            self._group = _join(store, rank, size, device, timedelta(seconds=timeout_s))

    def all_reduce(self, x: Tensor) -> None:
        """Sums x [any shape, contiguous] over the ranks, in place."""
        if x.numel():
            with _as_peer_lost():
                self._group.allreduce([x]).wait()

    def broadcast(self, x: Tensor) -> None:
        """Overwrites x with rank 0's."""
        if x.numel():
            options = BroadcastOptions()
            options.rootRank = 0
            with _as_peer_lost():
                self._group.broadcast([x], options).wait()

    def broadcast_flag(self, flag: bool = False) -> bool:
        """Returns rank 0's flag on every rank: the others wait for it as long as rank 0 lives.

        On the host alone.
        """
        x = torch.tensor([flag])
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = _FOR_EVER
        with _as_peer_lost():
            self._group.broadcast([x], options).wait(_FOR_EVER)
        return bool(x)

    def meet(self) -> None:
        """Returns when all ranks have come here. On the host alone."""
        self.all_reduce(torch.zeros(1))

    def gather(self, x: Tensor) -> list[Tensor]:
        """Returns every rank's x, of one shape, in their order; empty except at rank 0."""
        options = GatherOptions()
        options.rootRank = 0
        rows = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        with _as_peer_lost():
            self._group.gather([rows] if rows else [], [x], options).wait()
        return rows


class SplitHead:
    """An lm_head that is split by vocabulary: each rank has the rows of its share."""

    def __init__(self, part: Linear, ranks: Communicator, vocab_size: int) -> None:
        self._part = part
        self._ranks = ranks
        self._vocab_size = vocab_size

    def __call__(self, x: Tensor) -> Tensor:
        """x [r, H] -> [r, vocab] at rank 0; elsewhere the rank's own columns."""
        return self._whole(self._part(x))

    def after_norm(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """As `Linear.after_norm`, with the logits of `__call__`."""
        columns, total = self._part.after_norm(x, residual, norm_weight, eps)
        return self._whole(columns), total

    def _whole(self, columns: Tensor) -> Tensor:
        rows, own = columns.shape
        if not rows:
            return columns.new_empty(0, self._vocab_size)
        widest = ceil_div(self._vocab_size, self._ranks.size)
        parts = self._ranks.gather(pad(columns, (0, widest - own)).contiguous())
        return torch.cat(parts, dim=1)[:, : self._vocab_size] if parts else columns


def _join(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:  # noqa: ANN401 - torch's stubs know a backend without its collectives
    """Makes a group of our own, which leaves torch's process-wide default group alone."""
    if device.type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # a CPU build of torch has none

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return ProcessGroupNCCL(store, rank, size, nccl)
    # The stubs lack what a group needs to know its network.
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    gloo._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    return ProcessGroupGloo(store, rank, size, gloo)


@contextmanager
def _as_peer_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of every backend, and of the store
        raise PeerLost(" ".join(str(error).split())[:200]) from error
