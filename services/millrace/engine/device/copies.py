"""Copies between the host and a device for which the host does not wait.

A copy from or to pinned memory only joins the device's queue. torch keeps pinned memory from new
owners until the copies that use it are done, so each copy may take new memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(device: torch.device, *tables: Tensor) -> Sequence[Tensor]:
    """Returns the tables, int64 [n] each, on the device, by one copy for all that are on the host.

    Tables on the device already are returned as they are, and so are all where the device is the
    host.
    """
    if device.type == "cpu":
        return tables
    on_host = [table for table in tables if table.device.type == "cpu"]
    packed = torch.empty(sum(map(len, on_host)), dtype=torch.int64, pin_memory=True)
    torch.cat(on_host, out=packed)
    parts = iter(
        packed.to(device, non_blocking=True).split_with_sizes([len(table) for table in on_host])
    )
    return [next(parts) if table.device.type == "cpu" else table for table in tables]


def send(device: torch.device, table: Tensor) -> Tensor:
    """Returns a tensor of the host on the device."""
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)


class HostCopies:
    """Copies of tensors on their way to the host, behind the work that computes them."""

    def __init__(self, *tensors: Tensor) -> None:
        """Begins the copies. All tensors are on one device."""
        self._there = tensors
        self._here = tensors
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type == "cpu":
            return
        self._here = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
        for here, there in zip(self._here, tensors, strict=True):
            here.copy_(there, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch: untyped
        self._event.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> Sequence[Tensor]:
        """Returns the copies when they have arrived; later work of the device goes on."""
        if self._event is not None:
            self._event.synchronize()
        return self._here
