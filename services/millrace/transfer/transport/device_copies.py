"""Writes between two transports of one process whose memory lies on one GPU: the GPU copies.

UCX serves no two agents of one process by CUDA IPC, and copies through the host instead: 0.4 GB/s
on an H100, whose own copies run at more than 1000 GB/s. Nor is anything between these two memories
that a copy would have to cross.

Few long runs are copied one by one. Many short ones are rows of a table: a gather brings rows of
the source into a buffer, a scatter takes them to their places in the target, a buffer at a time.
All this is enqueued on a stream of its own, and an event behind it says when the bytes lie there.
"""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from millrace.transfer.transport.base import PeerLostError
from millrace.transfer.transport.regions import HOST, Memory
from millrace.transfer.transport.runs import Runs

#: The most bytes of rows between a gather and its scatter. Each GPU has one such buffer.
BUFFER_BYTES: Final = 32 << 20
#: From this mean length on runs are copied one by one: the host enqueues each in a few µs.
LONG_RUN_BYTES: Final = 1 << 20
#: Below this grain, too: a row has two numbers of 8 bytes, which say from where to where it goes.
LEAST_GRAIN_BYTES: Final = 64

_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class _Device(NamedTuple):
    stream: torch.cuda.Stream
    buffer: Tensor  # uint8 [BUFFER_BYTES]


class DeviceCopies:
    """The copies between a process's transports, `Copies` of each of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._devices: dict[int, _Device] = {}

    def opened(self, name: str) -> None:
        """Notes a transport of this process."""
        with self._lock:
            self._open.add(name)

    def closed(self, name: str) -> None:
        """Waits for all copies: any of them may be to the transport's memory, and none will be."""
        with self._lock:
            self._open.discard(name)
            streams = [device.stream for device in self._devices.values()]
        for stream in streams:
            with suppress(Exception):  # a broken GPU copies nothing any more
                stream.synchronize()

    def serves(self, peer: str, source: Memory, target: Memory) -> bool:
        """Returns whether the peer is a transport of this process, and its memory on our GPU."""
        return source.device == target.device != HOST and peer in self._open

    @torch.inference_mode()
    def begin(self, peer: str, source: Memory, target: Memory, runs: Runs) -> torch.cuda.Event:
        """Enqueues the copy of `runs`, which leave neither region. What wrote the source has ended.

        Raises PeerLostError for a peer that is not open any more.
        """
        with self._lock:
            if peer not in self._open:
                raise PeerLostError(f"{peer} is closed")
            stream, buffer = self._device(source.device)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch: untyped
            with torch.cuda.stream(stream):
                try:
                    copy_runs(_bytes(source), _bytes(target), runs, buffer)
                except Exception:
                    stream.synchronize()  # what was enqueued reads the source
                    raise
                event.record(stream)
            return event

    def _device(self, index: int) -> _Device:
        if index not in self._devices:
            device = torch.device("cuda", index)
            # Before the compute that runs beside it: a request waits for the copy.
            stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call] # as above
            with torch.cuda.stream(stream):
                buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
            self._devices[index] = _Device(stream, buffer)
        return self._devices[index]


#: The copies of this process. Who opens two transports in one process gives them to both.
COPIES: Final = DeviceCopies()


def copy_runs(source: Tensor, target: Tensor, runs: Runs, buffer: Tensor) -> None:
    """Enqueues the copy of `runs` between two regions, on the current stream. The host does not
    wait.

    source, target: uint8 [bytes], contiguous, on one device; `buffer` too, with a row at least.
    """
    grain = runs.grain()
    if grain < LEAST_GRAIN_BYTES or runs.total_bytes >= LONG_RUN_BYTES * len(runs):
        columns = (runs.source.tolist(), runs.target.tolist(), runs.length.tolist())
        for from_, to, length in zip(*columns, strict=True):
            target[to : to + length].copy_(source[from_ : from_ + length], non_blocking=True)
        return
    numbers = torch.from_numpy(np.stack(runs.indices(grain)))
    if source.is_cuda:
        numbers = numbers.pin_memory()  # else the host would wait for its copy
    from_rows, to_rows = numbers.to(source.device, non_blocking=True).unbind()
    word = math.gcd(grain, source.data_ptr(), target.data_ptr(), max(_WORDS))
    sources, targets, held = (_rows(region, grain, word) for region in (source, target, buffer))
    for start in range(0, len(from_rows), len(held)):
        piece = slice(start, start + len(held))
        rows = held[: len(from_rows[piece])]
        torch.index_select(sources, 0, from_rows[piece], out=rows)
        targets.index_copy_(0, to_rows[piece], rows)


def _rows(region: Tensor, grain: int, word: int) -> Tensor:
    """Views uint8 [bytes] as words [rows, words of a grain]; a last part of a row is left out."""
    count = len(region) // grain
    return region[: count * grain].view(_WORDS[word]).view(count, grain // word)


class _Region:
    """A region as CUDA's array interface describes it, from which torch makes a tensor."""

    def __init__(self, memory: Memory) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.pointer, False),  # not read-only
            "version": 3,
        }


def _bytes(memory: Memory) -> Tensor:
    """Views a device's region as uint8 [bytes]."""
    view = torch.as_tensor(_Region(memory), device=torch.device("cuda", memory.device))
    if view.data_ptr() != memory.pointer:
        raise RuntimeError(f"torch copied memory of cuda:{memory.device} that it should show")
    return view
