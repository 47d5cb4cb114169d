"""The bytes of a tensor's memory, as the host sees them."""

from __future__ import annotations

import torch

from millrace.transfer.transport.regions import Memory


class ByteWindow:
    """The bytes of a contiguous tensor on any device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = tensor.view(torch.uint8).view(-1)

    @property
    def memory(self) -> Memory:
        return Memory.of_tensor(self._bytes)

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def read(self, start: int, count: int) -> bytes:
        return self._bytes[start : start + count].cpu().numpy().tobytes()

    def write(self, start: int, data: bytes) -> None:
        """Writes bytes; returns when the device holds them."""
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._bytes[start : start + len(data)].copy_(source)
        if self._bytes.is_cuda:
            torch.cuda.synchronize(self._bytes.device)
