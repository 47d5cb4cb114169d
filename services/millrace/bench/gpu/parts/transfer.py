"""Part *transfer*: NIXL between the memories of two processes, on the device and on the host.

KV that lies on a device is sent from there. Memory of the host is what remains if NIXL can't
register the device's: then a copy to the host goes before the write, and a copy back after it.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from torch import Tensor

from millrace.bench.gpu.part import Context
from millrace.core.errors import TransferError
from millrace.engine.attention_cost import settled_s
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs

_ANSWER_S: Final = 30.0
_REPEATS: Final = 4


def check(context: Context) -> None:
    """Writes a pattern each way and compares it in the other process."""
    size = (256 << 20) if context.is_cuda else (4 << 20)
    ways = [str(context.device), "cpu"] if context.is_cuda else ["cpu"]
    for memory in ways:
        try:
            rate = send(context.device, memory, size)
            context.claim(f"through memory of {memory}", True)
            context.figure(f"NIXL through memory of {memory}", rate / 1e9, "GB/s")
        except TransferError as error:
            context.claim(f"through memory of {memory}", False, str(error))


def send(device: torch.device, memory: str, size: int) -> float:
    """Sends `size` bytes between two processes' tensors on the device, through memory of
    `memory`. Returns bytes/s with the sender's copy, the best of a few.
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


def _send(pipe: Connection, device: torch.device, memory: str, size: int) -> float:
    transport = NixlTransport(f"gpu-sender-{os.getpid()}")
    try:
        kv, crossed = _tensors(device, memory, size)
        region = transport.register(Memory.of_tensor(crossed))
        metadata, peer_region = _hear(pipe)
        peer = transport.connect(metadata).result(_ANSWER_S)
        rates = []
        for number in range(_REPEATS):
            kv.copy_(pattern(size, number))
            begun_s = settled_s(device)
            _copy(crossed, kv)
            settled_s(device)  # the bytes are there before NIXL reads them
            runs = Runs.of(0, 0, size)
            transport.write(peer, runs, b"", region=region, peer_region=peer_region).result(
                _ANSWER_S
            )
            rates.append(size / (time.perf_counter() - begun_s))
            pipe.send(number)
            if wrong := _hear(pipe):
                raise TransferError(f"{wrong} of {size} bytes differ at the receiver")
        return max(rates)
    finally:
        transport.close()


def _receive(pipe: Connection, device_name: str, memory: str, size: int) -> None:
    """Answers the number of wrong bytes after each write; an error as its text."""
    try:
        device = torch.device(device_name)
        transport = NixlTransport(f"gpu-receiver-{os.getpid()}")
        kv, crossed = _tensors(device, memory, size)
        region = transport.register(Memory.of_tensor(crossed))
        pipe.send((transport.metadata(), region))
        while True:
            number = pipe.recv()
            _copy(kv, crossed)
            settled_s(device)
            pipe.send(int((kv.cpu() != pattern(size, number)).sum()))
    except EOFError:
        pass
    except Exception as error:  # reported by the other process, whatever it is
        pipe.send(TransferError(f"the receiving process: {error}"))


def pattern(size: int, number: int) -> Tensor:
    """Returns uint8 [size] on the host, other for each write."""
    return torch.arange(size, dtype=torch.int32).add_(number).remainder_(251).to(torch.uint8)


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
