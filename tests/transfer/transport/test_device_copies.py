"""Copies by the GPU: the arithmetic on the host, the calls on a device that counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from millrace.transfer.transport import device_copies
from millrace.transfer.transport.base import PeerLostError
from millrace.transfer.transport.device_copies import DeviceCopies, copy_runs
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import HOST, Memory
from millrace.transfer.transport.runs import Runs
from support.deadlines import HANG_S
from support.fake_cuda import FakeCuda, fake_cuda

SIZE = 1 << 20


def pages(page: int, count: int, seed: int = 0, size: int = SIZE) -> Runs:
    """Returns `count` runs of a page each, from and to any places."""
    rng = np.random.default_rng(seed)
    places = [rng.permutation(size // page)[:count].astype(np.int64) * page for _ in range(2)]
    return Runs(*places, np.full(count, page, dtype=np.int64))


def triples(*rows: tuple[int, int, int]) -> Runs:
    return Runs(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


def filled(size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(3).integers(1, 256, size, dtype=np.uint8)


def by_hand(source: np.ndarray, runs: Runs) -> np.ndarray:
    """Returns what a target of zeros holds after the runs."""
    target = np.zeros_like(source)
    for start, to, length in zip(runs.source, runs.target, runs.length, strict=True):
        target[to : to + length] = source[start : start + length]
    return target


CASES = {
    "pages": pages(4096, 100),
    "one page": pages(65_536, 1),
    "pages of every length of a grain": triples((0, 4096, 8192), (16_384, 64, 64), (640, 0, 64)),
    "grains of 2 bytes alone": triples((66, 132, 66), (264, 396, 132)),
    "no common grain": triples((1, 9, 4001), (9000, 77, 7), (20_000, 40_001, 9973)),
    "few long runs": triples((0, 4096, SIZE - 8192)),
    "layers": pages(4096, 9, size=SIZE // 4).shifted(SIZE // 2, SIZE // 4),
    "none": triples((0, 0, 1)).repeated([], []),
}


@pytest.mark.parametrize("runs", CASES.values(), ids=CASES)
@pytest.mark.parametrize("at", [0, 1, 2, 4], ids="pointer_by_{}".format)
@pytest.mark.parametrize("room", [SIZE, 70_000], ids=["whole", "in_pieces"])
@pytest.mark.parametrize("long_run", [SIZE, 1 << 40], ids=["mixed", "rows_alone"])
def test_runs_land_exactly(runs, at, room, long_run, monkeypatch):
    """Wherever the memory begins, and however little fits in the buffer."""
    grain = runs.grain() or 1
    if long_run > SIZE and grain > room:
        room = grain  # a row at least
    monkeypatch.setattr(device_copies, "LONG_RUN_BYTES", long_run)
    source = torch.zeros(SIZE + 8, dtype=torch.uint8)[at:][:SIZE]
    source.copy_(torch.from_numpy(filled()))
    target = torch.zeros(SIZE + 8, dtype=torch.uint8)
    copy_runs(source, target[at : at + SIZE], runs, torch.empty(room, dtype=torch.uint8))
    assert (target[at : at + SIZE].numpy() == by_hand(source.numpy(), runs)).all()
    assert not target[:at].any() and not target[at + SIZE :].any()


def test_a_buffer_is_as_long_as_the_longest_row():
    assert device_copies.LONG_RUN_BYTES <= device_copies.BUFFER_BYTES


# -- on the device


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    pytest.importorskip("triton", reason="triton (extra `gpu`) isn't installed")
    with fake_cuda(monkeypatch) as device:
        yield device


def on_device(array: np.ndarray, device: int = 0) -> Memory:
    return Memory(array.ctypes.data, array.nbytes, device)


@pytest.fixture
def copies() -> DeviceCopies:
    made = DeviceCopies()
    made.opened("decode")
    return made


@pytest.mark.parametrize("in_inference", [False, True])
def test_a_copy_is_enqueued_and_the_host_waits_for_nothing(cuda, copies, in_inference):
    source, target = filled(), np.zeros(SIZE, dtype=np.uint8)
    runs = pages(4096, 100)
    ends = on_device(source), on_device(target)
    with torch.inference_mode(in_inference):
        copies.begin("decode", *ends, Runs.of(0, 0, 8))  # makes stream and buffer
    with torch.inference_mode(not in_inference), cuda.counted() as counts:
        event = copies.begin("decode", *ends, runs)
    assert counts.launches == 2  # a gather, a scatter
    assert counts.copies == 1  # the rows' numbers
    assert counts.allocations == 1 and not counts.syncs
    assert not counts.by_name["wait event"] and not counts.by_name["wait stream"]
    assert event.query()
    target[:8] = 0
    found, expected = target.copy(), by_hand(source, runs)
    expected[:8] = 0
    assert (found == expected).all()


def test_many_bytes_go_through_the_buffer_in_pieces(cuda, copies, monkeypatch):
    monkeypatch.setattr(device_copies, "BUFFER_BYTES", 64 << 10)
    source, target = filled(), np.zeros(SIZE, dtype=np.uint8)
    runs = pages(4096, 100)
    with cuda.counted() as counts:
        copies.begin("decode", on_device(source), on_device(target), runs)
    assert counts.launches == 2 * 7 and counts.copies == 1  # 16 pages at a time
    assert (target == by_hand(source, runs)).all()


def test_served_is_the_same_gpu_and_an_open_transport_of_this_process(copies):
    memory = np.zeros(64, dtype=np.uint8)
    first, second = on_device(memory), on_device(memory, 1)
    assert copies.serves("decode", first, first) and copies.serves("decode", second, second)
    assert not copies.serves("decode", first, second)
    assert not copies.serves("another process's", first, first)
    host = Memory.of_array(memory)
    assert host.device == HOST and not copies.serves("decode", host, host)
    copies.closed("decode")
    assert not copies.serves("decode", first, first)


def test_a_transport_closes_when_the_copies_have_ended_and_then_gets_none(cuda, copies):
    memory = on_device(np.zeros(64, dtype=np.uint8))
    copies.begin("decode", memory, memory, Runs.of(0, 32, 8))
    with cuda.counted() as counts:
        copies.closed("decode")
    assert counts.by_name["wait stream"] == 1
    with pytest.raises(PeerLostError, match="decode is closed"):
        copies.begin("decode", memory, memory, Runs.of(0, 32, 8))


def test_a_copy_that_fails_midway_reads_nothing_when_it_is_told(cuda, copies, monkeypatch):
    memory = on_device(np.zeros(SIZE, dtype=np.uint8))

    def broken(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("no memory for the numbers of rows")

    monkeypatch.setattr(torch, "index_select", broken)
    with cuda.counted() as counts, pytest.raises(torch.OutOfMemoryError):
        copies.begin("decode", memory, memory, pages(4096, 10))
    assert counts.by_name["wait stream"] == 1


def test_memory_that_torch_copies_is_refused(copies, cuda, monkeypatch):
    array = np.zeros(64, dtype=np.uint8)
    monkeypatch.setattr(torch, "as_tensor", lambda region, device: torch.zeros(64))
    with pytest.raises(RuntimeError, match="torch copied memory of cuda:0"):
        copies.begin("decode", on_device(array), on_device(array), Runs.of(0, 32, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_two_transports_of_one_process_on_a_gpu(name):
    runs, own = CASES[name], DeviceCopies()
    source = torch.from_numpy(filled()).cuda()
    target = torch.zeros_like(source)
    ends = [NixlTransport(f"one-gpu-{side}", own) for side in range(2)]
    try:
        for end, tensor in zip(ends, (source, target), strict=True):
            end.register(Memory.of_tensor(tensor))
        torch.cuda.synchronize()
        peer = ends[0].connect(ends[1].metadata()).result(HANG_S)
        for _ in range(3):
            ends[0].write(peer, runs, b"\x07here").result(HANG_S)
        assert (target.cpu().numpy() == by_hand(filled(), runs)).all()
    finally:
        for end in ends:
            end.close()
