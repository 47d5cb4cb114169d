"""Memory that a transport may read and write, and copies between its pieces on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from millrace.transfer.transport.runs import Runs

HOST = -1

# Below this mean run length, one vectorised copy of rows is faster than one memmove per run.
_VECTOR_BELOW_BYTES = 2048


class TensorLike(Protocol):
    """The methods of torch.Tensor that a region needs, so that this package imports no torch."""

    def data_ptr(self) -> int: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...
    def get_device(self) -> int: ...
    def is_contiguous(self) -> bool: ...


class Bytes(Protocol):
    """Bytes that the host reads and writes, wherever they lie."""

    @property
    def nbytes(self) -> int: ...

    def read(self, start: int, count: int) -> bytes: ...

    def write(self, start: int, data: bytes) -> None:
        """Returns when the bytes lie there."""


class JoinedBytes:
    """Several `Bytes`, one after another. No call may cross from one into the next."""

    def __init__(self, parts: Sequence[Bytes]) -> None:
        self._parts = tuple(parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def read(self, start: int, count: int) -> bytes:
        part, start = self._at(start)
        return part.read(start, count)

    def write(self, start: int, data: bytes) -> None:
        part, start = self._at(start)
        part.write(start, data)

    def _at(self, start: int) -> tuple[Bytes, int]:
        for part in self._parts:
            if start < part.nbytes:
                return part, start
            start -= part.nbytes
        raise ValueError("the bytes begin past the end")


@dataclass(frozen=True, slots=True)
class Memory:
    """A contiguous region. `device` is a CUDA device's index, or HOST. The owner keeps it alive."""

    pointer: int
    nbytes: int
    device: int = HOST

    @staticmethod
    def of_tensor(tensor: TensorLike) -> Memory:
        """Returns the memory of a contiguous tensor. Raises ValueError for any other."""
        if not tensor.is_contiguous():
            raise ValueError("only a contiguous tensor can be registered as one region")
        nbytes = tensor.numel() * tensor.element_size()
        return Memory(tensor.data_ptr(), nbytes, tensor.get_device())

    @staticmethod
    def of_array(array: npt.NDArray[np.uint8]) -> Memory:
        """Returns the memory of a contiguous NumPy array. Raises ValueError for any other."""
        if not array.flags.c_contiguous:
            raise ValueError("only a contiguous array can be registered as one region")
        return Memory(array.ctypes.data, array.nbytes)


class ByteView(Bytes, Protocol):
    """Memory that a transport may write to and the host reads and writes."""

    @property
    def memory(self) -> Memory: ...


def host_bytes(memory: Memory) -> npt.NDArray[np.uint8]:
    """Returns a host region as uint8 [nbytes]. Raises ValueError for a device's region."""
    if memory.device != HOST:
        raise ValueError("only memory on the host can be seen as bytes")
    found: npt.NDArray[np.uint8] = _rows(memory, memory.nbytes)[0]
    return found


def copy_on_host(source: Memory, target: Memory, runs: Runs) -> None:
    """Copies the runs between two host regions. Raises ValueError for a device or bad bounds."""
    if source.device != HOST or target.device != HOST:
        raise ValueError("copy_on_host needs host memory on both sides")
    runs.check_within(source.nbytes, target.nbytes)
    if not len(runs):
        return
    if runs.total_bytes < _VECTOR_BELOW_BYTES * len(runs):
        _copy_rows(source, target, runs)
        return
    for from_, to, length in zip(
        (runs.source + source.pointer).tolist(),
        (runs.target + target.pointer).tolist(),
        runs.length.tolist(),
        strict=True,
    ):
        ctypes.memmove(to, from_, length)


def _copy_rows(source: Memory, target: Memory, runs: Runs) -> None:
    grain = runs.grain()
    from_, to = runs.indices(grain)
    _rows(target, grain)[to] = _rows(source, grain)[from_]


def _rows(memory: Memory, grain: int) -> npt.NDArray[np.uint8]:
    count = memory.nbytes // grain
    buffer = (ctypes.c_uint8 * (count * grain)).from_address(memory.pointer)
    return np.ctypeslib.as_array(buffer).reshape(count, grain)
