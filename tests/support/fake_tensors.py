"""A tensor that says it is on a CUDA device and holds its numbers on the host."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_map

CUDA = torch.device("cuda", 0)
META = torch.device("meta")

alive: weakref.WeakValueDictionary[int, DeviceTensor] = weakref.WeakValueDictionary()


class DeviceTensor(torch.Tensor):
    """A tensor on the fake device; `host` has its numbers."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=META,
        )
        made.host = host
        alive[id(made)] = made
        return made

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_meta(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def __repr__(self) -> str:
        return f"DeviceTensor({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a device tensor outside its FakeCuda")


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def hosts(values: Any) -> Any:
    def host(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            return value.host
        return torch.device("cpu") if value == META and isinstance(value, torch.device) else value

    return tree_map(host, values)


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
