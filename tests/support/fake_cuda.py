"""A CUDA device without a GPU: it computes on the host and counts what a real device would do.

A `DeviceTensor` says that it is on `cuda:0` and holds its numbers in host memory. So the engine
takes its own CUDA paths, and every value is real. Counted are kernel launches, copies, allocations,
and synchronisations: whatever makes the host wait for the device. A copy into pinned memory arrives
only when an event that was recorded after it is waited for, as on a device; a host that reads too
early reads old numbers.

Triton's kernels run in its interpreter where TRITON_INTERPRET is set. Else they are counted and
compute nothing.
"""

from __future__ import annotations

import ctypes
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from millrace_kernels import triton_backend
from millrace_kernels.triton_backend import configs
from support.fake_graphs import INTERPRETS, FakeGraph, call_again, spoil
from support.fake_tensors import CUDA, META, DeviceTensor, hosts, is_tensor

_aten = torch.ops.aten
_SYNCS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
    _aten._unique2.default,
}
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_SOURCES = ("services", "kernels")


@dataclass
class Counts:
    """What the device was asked for. `syncs`: where the host waited for all of it, and why;
    `behind`: what was enqueued behind each event for which the host waited."""

    launches: int = 0
    copies: int = 0
    allocations: int = 0
    replays: int = 0
    by_name: Counter[str] = field(default_factory=Counter)
    behind: list[int] = field(default_factory=list)
    syncs: list[str] = field(default_factory=list)


class FakeEvent:
    """`torch.cuda.Event`."""

    def __init__(self, device: FakeCuda, **options: object) -> None:
        self._device = device
        self._before = 0

    def record(self, stream: object = None) -> None:
        self._before = self._device.enqueued

    def synchronize(self) -> None:
        self._device.wait_for(self._before, "event")

    def elapsed_time(self, later: FakeEvent) -> float:
        """Returns 0 ms."""
        return 0.0

    def query(self) -> bool:
        """Returns True: nothing in a test takes time."""
        self._device.arrive(self._before)
        return True


class FakeStream:
    """`torch.cuda.Stream`, of which the device has only one queue."""

    def __init__(self, device: FakeCuda, **options: object) -> None:
        self._device = device

    def synchronize(self) -> None:
        self._device.wait_for(self._device.enqueued, "stream")


class FakeCuda:
    """The device. `counts` are since the last `counted`."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.enqueued = 0
        self.graphs: list[FakeGraph] = []
        self.captured: FakeGraph | None = None
        self._arriving: list[tuple[int, Callable[[], object]]] = []
        self._pinned: set[int] = set()

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """Counts from zero in the block."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    def replayed(self) -> None:
        """Counts a replay."""
        self.counts.replays += 1
        self.enqueued += 1

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def sync(self, why: str) -> None:
        """Notes that the host waits, and for whom."""
        assert self.captured is None, f"the host waits while a graph is captured: {why}"
        frames = [
            frame
            for frame in traceback.extract_stack()
            if any(f"/{name}/" in frame.filename for name in _SOURCES)
            and "/site-packages/" not in frame.filename
        ]
        at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "the test"
        self.counts.syncs.append(f"{why} at {at}")
        self.arrive(self.enqueued)

    def wait_for(self, before: int, why: str) -> None:
        """Waits for what was enqueued up to that number."""
        self.counts.by_name[f"wait {why}"] += 1
        self.counts.behind.append(self.enqueued - before)
        self.arrive(before)

    def arrive(self, before: int) -> None:
        """Lets copies to the host arrive."""
        ready = [copy for number, copy in self._arriving if number <= before]
        self._arriving = [item for item in self._arriving if item[0] > before]
        for copy in ready:
            copy()

    def launch(
        self, name: str, work: Callable[[], object], tensors: Iterable[torch.Tensor]
    ) -> None:
        """Runs a kernel, and records it where a graph is captured."""
        self.counts.launches += 1
        self.counts.by_name[name] += 1
        self.enqueued += 1
        work()
        if self.captured is not None:
            self.captured.touches(tensors, ())
            self.captured.add(work)

    @contextmanager
    def capturing(self, graph: FakeGraph, **options: object) -> Iterator[None]:
        """`torch.cuda.graph`."""
        assert self.captured is None
        self.captured = graph
        try:
            yield
        finally:
            self.captured = None
        self.graphs.append(graph)

    # -- torch's operators

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator one of whose tensors is on the device."""
        leaves = tree_leaves((args, kwargs))
        if func in _EMPTY:
            self.counts.allocations += 1
        elif (
            func in (_aten._to_copy.default, _aten.copy_.default)
            and (copied := self._copy(func, args, kwargs)) is not None
        ):
            return copied
        elif func in _SYNCS or _by_mask(func, args):
            self.sync(str(func).removeprefix("aten.").removesuffix(".default"))
        if self._is_work(func):
            return self._compute(func, args, kwargs, leaves)
        out = func(*hosts(args), **hosts(kwargs))
        if func in _EMPTY:
            spoil(out)
            if self.captured is not None:
                self.captured.touches((), (out,))
        return self._wrapped(out, leaves)

    def _compute(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        out = func(*hosts(args), **hosts(kwargs))
        inputs = {id(leaf.host) for leaf in leaves if isinstance(leaf, DeviceTensor)}
        fresh = [x for x in tree_leaves(out) if is_tensor(x) and id(x) not in inputs]
        self.counts.allocations += len(fresh)
        self.counts.launches += 1
        self.counts.by_name[str(func).removeprefix("aten.")] += 1
        self.enqueued += 1
        if self.captured is not None:
            used = [leaf.host for leaf in leaves if isinstance(leaf, DeviceTensor)]
            self.captured.touches(used, fresh)
            self.captured.add(call_again(func, hosts(args), hosts(kwargs), out, inputs))
        return self._wrapped(out, leaves)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Copies between host and device; None for a copy on one side."""
        if func is _aten._to_copy.default:
            source, target, wanted = args[0], None, kwargs.get("device")
            is_on = isinstance(source, DeviceTensor)
            goes_in = not is_on and wanted == META
            if not goes_in and not (is_on and wanted is not None and wanted.type == "cpu"):
                return None
            is_async = bool(kwargs.get("non_blocking"))
            if goes_in:
                self.counts.allocations += 1
                target = DeviceTensor(torch.empty_like(source, dtype=kwargs.get("dtype")))
            else:
                target = torch.empty_like(source.host, dtype=kwargs.get("dtype"))
        else:
            target, source = args[:2]
            if isinstance(target, DeviceTensor) == isinstance(source, DeviceTensor):
                return None
            is_async = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
        self._transfer(target, source, is_async)
        return target

    def _transfer(self, target: torch.Tensor, source: torch.Tensor, is_async: bool) -> None:
        self.counts.copies += 1
        self.enqueued += 1
        is_in = isinstance(target, DeviceTensor)
        there, here = (target.host, source) if is_in else (target, source.host)  # type: ignore
        host_side = source if is_in else target
        name = "to the device" if is_in else "to the host"
        if not is_async or not self.is_pinned(host_side):
            self.sync(f"{'pageable ' if is_async else ''}copy {name}")
            there.copy_(here)
            return
        if is_in:
            assert self.captured is None, "a graph copies from the host"
            there.copy_(here)
            return
        assert self.captured is None, "a graph copies to the host"
        held = here.clone()
        self._arriving.append((self.enqueued, lambda: there.copy_(held)))

    def _is_work(self, func: Any) -> bool:
        if func in _EMPTY:
            return False
        returned = func._schema.returns
        alias = returned[0].alias_info if returned else None
        return alias is None or alias.is_write

    def _wrapped(self, out: Any, leaves: list[Any]) -> Any:
        known = {id(leaf.host): leaf for leaf in leaves if isinstance(leaf, DeviceTensor)}

        def wrap(value: Any) -> Any:
            if not is_tensor(value):
                return value
            found = known.get(id(value))
            return DeviceTensor(value) if found is None else found

        return tree_map(wrap, out)


def _by_mask(func: Any, args: Any) -> bool:
    """Returns whether an index is a mask, whose true entries the host must count."""
    if func not in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default):
        return False
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


class _Functions(TorchFunctionMode):
    """Makes torch's functions take the fake device, and pinned memory."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, DeviceTensor) and name in ("tolist", "numpy"):
            self._device.sync(name)
            return getattr(first.host.clone(), name)(*args[1:])
        args, kwargs = tree_map(_as_meta, args), tree_map(_as_meta, kwargs)
        pins = bool(kwargs.pop("pin_memory", False)) or name == "pin_memory"
        if name == "pin_memory":
            return self._device.pin(first.clone())
        if name == "is_pinned":
            return self._device.is_pinned(first)
        if (region := getattr(first, "__cuda_array_interface__", None)) is not None:
            return _at(region) if name == "as_tensor" else func(*args, **kwargs)
        if kwargs.get("device") == META and name in ("tensor", "as_tensor", "from_numpy"):
            kwargs.pop("device")
            return func(*args, **kwargs).to(CUDA)
        made = func(*args, **kwargs)
        return self._device.pin(made) if pins else made


def _at(region: dict[str, Any]) -> DeviceTensor:
    """Shows bytes of the host's memory as the device's, by CUDA's array interface."""
    assert region["typestr"] == "|u1" and not region["data"][1]
    memory = (ctypes.c_uint8 * region["shape"][0]).from_address(region["data"][0])
    return DeviceTensor(torch.frombuffer(memory, dtype=torch.uint8))


def _as_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return META if value.type == "cuda" else value
    return META if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


class _Operators(TorchDispatchMode):
    def __init__(self, device: FakeCuda) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_there = any(isinstance(x, DeviceTensor) for x in tree_leaves((args, kwargs)))
        if not is_there and kwargs.get("device") != META:
            return func(*args, **kwargs)
        if func._can_decompose():  # in inference mode operators of several others come whole
            with self:
                return func.decompose(*args, **kwargs)
        return self._device.run(func, args, kwargs)


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Puts the device in the place of torch's for this thread, until the block ends."""
    from millrace_kernels.triton_backend import attention, linear, moe, rows, sampling

    device = FakeCuda()

    def launch(kernel, grid, *args, num_warps=4, num_stages=2, **constants) -> None:
        given = hosts(args)
        name = getattr(kernel, "__name__", None) or kernel.fn.__name__

        def work() -> None:
            if INTERPRETS:
                kernel[grid](*given, **constants)

        device.launch(name, work, [x for x in given if is_tensor(x)])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "fake")
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: FakeEvent(device, **options))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device_=None: FakeStream(device))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda on, **options: FakeStream(device, **options))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device_=None: device.sync("synchronize"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(device))
    monkeypatch.setattr(torch.cuda, "graph", device.capturing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    for module in (attention, linear, moe, rows, sampling):
        monkeypatch.setattr(module, "launch", launch)
    for cached in (triton_backend.unavailable, configs.gpu_name):
        cached.cache_clear()
    try:
        with _Functions(device), _Operators(device):
            yield device
    finally:
        for cached in (triton_backend.unavailable, configs.gpu_name):
            cached.cache_clear()
