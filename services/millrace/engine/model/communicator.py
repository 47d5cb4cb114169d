"""The collectives of one rank, over torch.distributed: gloo between hosts' memory, NCCL on CUDA.

Flags and meetings go over gloo on every device, so that a rank may wait for them without its GPU.
"""

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
    PrefixStore,
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

    Each call ends within `timeout_s`, with PeerLost where a rank is missing; over NCCL the call has
    only been enqueued when it returns. Sums are the same to the bit on every rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        device: torch.device,
        rendezvous: str,
        timeout_s: float,
        through_host: bool = False,
    ) -> None:
        """Waits for all `size` ranks.

        `rendezvous`: the path of a file that no earlier group has used. `through_host`: tensors on
        CUDA go through the host, for ranks on one device, which NCCL refuses.
        """
        self.rank = rank
        self.size = size
        self._device = device
        timeout = timedelta(seconds=timeout_s)
        store = FileStore(rendezvous, size)
        with _as_peer_lost():
            self._host = _join_host(PrefixStore("host", store), rank, size, timeout)
            self._nccl = None
            if device.type == "cuda" and not through_host:
                self._nccl = _join_nccl(PrefixStore("nccl", store), rank, size, timeout)
                self.all_reduce(torch.zeros(1, device=device))  # NCCL connects at its first use
                torch.cuda.synchronize(device)

    def all_reduce(self, x: Tensor) -> None:
        """Sums x [any shape, contiguous] over the ranks, in place."""
        if x.numel():
            with _as_peer_lost(), self._reachable(x) as near:
                self._group.allreduce([near]).wait()

    def broadcast(self, x: Tensor) -> None:
        """Overwrites x with rank 0's."""
        if x.numel():
            options = BroadcastOptions()
            options.rootRank = 0
            with _as_peer_lost(), self._reachable(x) as near:
                self._group.broadcast([near], options).wait()

    def broadcast_flag(self, flag: bool = False) -> bool:
        """Returns rank 0's flag on every rank: the others wait for it as long as rank 0 lives."""
        x = torch.tensor([flag])
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = _FOR_EVER
        with _as_peer_lost():
            self._host.broadcast([x], options).wait(_FOR_EVER)
        return bool(x)

    def meet(self) -> None:
        """Returns when all ranks have come here, with all that they have enqueued done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        with _as_peer_lost():
            self._host.allreduce([torch.zeros(1)]).wait()

    def gather(self, x: Tensor) -> list[Tensor]:
        """Returns every rank's x, of one shape, in their order; empty except at rank 0."""
        options = GatherOptions()
        options.rootRank = 0
        near = x if self._nccl is not None else x.cpu()
        rows = [torch.empty_like(near) for _ in range(self.size)] if self.rank == 0 else []
        with _as_peer_lost():
            self._group.gather([rows] if rows else [], [near], options).wait()
        return [row.to(x.device) for row in rows]

    @property
    def _group(self) -> Any:  # noqa: ANN401 - as `_join_host`
        return self._host if self._nccl is None else self._nccl

    @contextmanager
    def _reachable(self, x: Tensor) -> Iterator[Tensor]:
        """Yields x where the group's collectives reach it; what they write there comes to x."""
        near = x if self._nccl is not None else x.cpu()
        yield near
        if near is not x:
            x.copy_(near)


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


def _join_host(store: Store, rank: int, size: int, timeout: timedelta) -> Any:  # noqa: ANN401 - torch's stubs know a backend without its collectives
    """Makes a group of our own, which leaves torch's process-wide default group alone."""
    # The stubs lack what a group needs to know its network.
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    gloo._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    return ProcessGroupGloo(store, rank, size, gloo)


def _join_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:  # noqa: ANN401 - as `_join_host`
    from torch._C._distributed_c10d import ProcessGroupNCCL  # a CPU build of torch has none

    nccl = ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, nccl)


@contextmanager
def _as_peer_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of every backend, and of the store
        raise PeerLost(" ".join(str(error).split())[:200]) from error
