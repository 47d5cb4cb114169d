"""Part *transfer*: K/V between the memories of two processes, on the device and on the host.

KV that lies on a device is sent from there, beside a bare copy between the same processes' memory
(CUDA IPC, one call of the driver). Memory of the host is what remains if NIXL can't register the
device's: then a copy to the host goes before the write, and a copy back after it.

Between two transports of one process, as those of `millrace colocated --role pair`, the device
copies.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

from millrace.bench.gpu.part import Context
from millrace.core.errors import TransferError
from millrace.engine.attention_cost import settled_s
from millrace.transfer.transport.device_copies import COPIES
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs

_ANSWER_S: Final = 60.0
_REPEATS: Final = 6
_PAGE_BYTES: Final = 256 << 10
"""A layer's page of Llama-3-8B: 64 tokens, 8 heads of 128 numbers of 2 bytes, K and V."""


def check(context: Context) -> None:
    """Writes a pattern each way and compares it at the receiver."""
    size = (1 << 30) if context.is_cuda else (16 << 20)
    ways = [str(context.device), "cpu"] if context.is_cuda else ["cpu"]
    for memory in ways:
        try:
            for name, rate in send(context.device, memory, size).items():
                context.figure(f"{name} of {memory}", rate / 1e9, "GB/s")
            context.claim(f"through memory of {memory}", True)
        except TransferError as error:
            context.claim(f"through memory of {memory}", False, str(error))
    try:
        for name, rate in send_within(context.device, size).items():
            context.figure(name, rate / 1e9, "GB/s")
        context.claim("within one process", True)
    except TransferError as error:
        context.claim("within one process", False, str(error))


def send(device: torch.device, memory: str, size: int) -> dict[str, float]:
    """Sends `size` bytes between two processes' tensors on the device, through memory of
    `memory`. Returns bytes/s by the way, the best of a few, with the sender's copy to that memory.
    Raises TransferError.
    """
    spawn = mp.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_receive, args=(theirs, str(device), memory, size), daemon=True)
    process.start()
    theirs.close()  # so that the child's end is noticed
    try:
        return _send(ours, device, memory, size)
    finally:
        process.kill()
        process.join()


def send_within(device: torch.device, size: int) -> dict[str, float]:
    """Sends `size` bytes, and a 64th of them, between two transports of this process. Returns
    bytes/s by the way, the best of a few. Raises TransferError.
    """
    kv, there = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    rates = {}
    with ExitStack() as stack:
        sender, receiver = (NixlTransport(f"gpu-{n}-{os.getpid()}", COPIES) for n in range(2))
        for transport, tensor in ((sender, kv), (receiver, there)):
            stack.callback(transport.close)
            transport.register(Memory.of_tensor(tensor))
        peer = sender.connect(receiver.metadata()).result(_ANSWER_S)
        stack.enter_context(receiver.listening())
        for name, count in {
            "within one process, runs of 256 KiB": size,
            f"within one process, runs of 256 KiB, {size >> 16} KiB in all": size // 64,
        }.items():
            runs = scattered(count)
            rates[name] = 0.0
            for number in range(_REPEATS):
                _fill(kv, number)
                begun_s = settled_s(device)
                sender.write(peer, runs, b"").result(_ANSWER_S)
                rates[name] = max(rates[name], count / (time.perf_counter() - begun_s))
                if wrong := int((kv[:count] != there[:count]).sum()):
                    raise TransferError(f"{wrong} of {count} bytes differ within one process")
    return rates


def _send(pipe: Connection, device: torch.device, memory: str, size: int) -> dict[str, float]:
    transport = NixlTransport(f"gpu-sender-{os.getpid()}")
    try:
        kv, crossed = _tensors(device, memory, size)
        region = transport.register(Memory.of_tensor(crossed))
        metadata, peer_region = _hear(pipe)
        peer = transport.connect(metadata).result(_ANSWER_S)
        rates = {}
        for name, runs in {
            "NIXL, one run, through memory": Runs.of(0, 0, size),
            "NIXL, runs of 256 KiB, through memory": scattered(size),
        }.items():
            rates[name] = 0.0
            for number in range(_REPEATS):
                _fill(kv, number)
                begun_s = settled_s(device)
                _copy(crossed, kv)
                settled_s(device)  # the bytes are there before NIXL reads them
                writing = transport.write(peer, runs, b"", region=region, peer_region=peer_region)
                writing.result(_ANSWER_S)
                rates[name] = max(rates[name], size / (time.perf_counter() - begun_s))
                pipe.send(number)
                if wrong := _hear(pipe):
                    raise TransferError(f"{wrong} of {size} bytes differ at the receiver")
        if kv is crossed and device.type == "cuda":
            rates["a bare copy between memories"] = _bare(pipe, kv)
        return rates
    finally:
        transport.close()


def _bare(pipe: Connection, kv: Tensor) -> float:
    """Copies to a tensor of the other process by CUDA IPC. Returns bytes/s."""
    pipe.send(None)
    theirs = _hear(pipe)
    seconds = []
    for _ in range(_REPEATS):
        begun_s = settled_s(kv.device)
        theirs.copy_(kv)
        seconds.append(settled_s(kv.device) - begun_s)
    return len(kv) / min(seconds)


def scattered(size: int) -> Runs:
    """Returns runs of `_PAGE_BYTES`, whose places are in no order at either side."""
    starts = np.arange(0, size, _PAGE_BYTES, dtype=np.int64)
    places = np.random.default_rng(0).permutation(starts)
    return Runs(places, places, np.full(len(starts), _PAGE_BYTES, dtype=np.int64))


def _receive(pipe: Connection, device_name: str, memory: str, size: int) -> None:
    """Answers the number of wrong bytes after each write, then its memory; an error as its text."""
    try:
        device = torch.device(device_name)
        transport = NixlTransport(f"gpu-receiver-{os.getpid()}")
        kv, crossed = _tensors(device, memory, size)
        expected = torch.zeros_like(kv)
        region = transport.register(Memory.of_tensor(crossed))
        pipe.send((transport.metadata(), region))
        while (number := pipe.recv()) is not None:
            _copy(kv, crossed)
            _fill(expected, number)
            pipe.send(int((kv != expected).sum()))
        pipe.send(expected)
        pipe.recv()  # the tensor is the other process's as long as this one lives
    except EOFError:
        pass
    except Exception as error:  # reported by the other process, whatever it is
        pipe.send(TransferError(f"the receiving process: {error}"))


def _fill(kv: Tensor, number: int) -> None:
    """Writes a pattern to uint8 [size], other for each write."""
    numbers = torch.arange(len(kv), dtype=torch.int32, device=kv.device)
    kv.copy_(numbers.add_(number).remainder_(251))


def _tensors(device: torch.device, memory: str, size: int) -> tuple[Tensor, Tensor]:
    """Returns the K/V, and the memory that NIXL sees: the same where it is of that device."""
    kv = torch.zeros(size, dtype=torch.uint8, device=device)
    if memory == str(device):
        return kv, kv
    return kv, torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _copy(target: Tensor, source: Tensor) -> None:
    if target is not source:
        target.copy_(source)


def _hear(pipe: Connection) -> Any:  # noqa: ANN401 - any answer of the child
    if not pipe.poll(_ANSWER_S):
        raise TransferError(f"the receiving process did not answer within {_ANSWER_S:g} s")
    try:
        heard = pipe.recv()
    except EOFError:
        raise TransferError("the receiving process has died") from None
    if isinstance(heard, TransferError):
        raise heard
    return heard
