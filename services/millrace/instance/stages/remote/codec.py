"""The messages between the stages of an instance as bytes, for stages on other hosts.

Within a machine pipes carry them as pickles. Here a peer may be anyone who reaches the port (or,
with TLS, anyone whom the CA has signed for), so nothing is unpickled: a message is JSON, with the
bytes of its arrays behind it, and has objects of the classes in `_CLASSES` alone.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import orjson

from millrace.core.config import EngineConfig
from millrace.core.errors import TransferError
from millrace.core.kv.kvp_pass import ExchangeShape, RemoteRows, RemoteShard
from millrace.core.kv.layout import KvLayout
from millrace.engine.kv.page_table import TableDelta
from millrace.engine.model.stage import Stage
from millrace.engine.parallel import commands
from millrace.engine.pipeline import messages
from millrace.instance.stages import stage_process
from millrace.transfer.activations import Inlet
from millrace.transfer.transport.regions import Memory
from millrace_kernels.determinism import Alike

_LENGTH: Final = struct.Struct("<I")
_MODULES: Final = (commands, messages, stage_process)
_OTHERS: Final = (
    EngineConfig,
    ExchangeShape,
    Inlet,
    KvLayout,
    Memory,
    RemoteRows,
    RemoteShard,
    Stage,
    TableDelta,
)


def _classes() -> Mapping[str, type]:
    own = [
        one
        for module in _MODULES
        for one in vars(module).values()
        if isinstance(one, type)
        and dataclasses.is_dataclass(one)
        and one.__module__ == module.__name__
    ]
    return {f"{one.__module__.rpartition('.')[2]}.{one.__name__}": one for one in (*own, *_OTHERS)}


_CLASSES: Final = _classes()
_NAMES: Final = {made: name for name, made in _CLASSES.items()}


def encode(message: object) -> bytes:
    """Returns a message as bytes. Raises TypeError for an object that no message has."""
    blobs: list[bytes | memoryview] = []
    head = orjson.dumps(_packed(message, blobs))
    return b"".join((_LENGTH.pack(len(head)), head, *blobs))


def decode(data: bytes) -> Any:  # noqa: ANN401 - any message
    """Returns the message of `encode`. Raises TransferError for bytes that are no message."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + length
        return _Reader(memoryview(data)[start:]).unpacked(orjson.loads(data[_LENGTH.size : start]))
    except (ValueError, TypeError, KeyError, IndexError, struct.error) as error:
        raise TransferError(f"not a message between stages: {error!r}") from error


def _packed(value: object, blobs: list[bytes | memoryview]) -> Any:  # noqa: ANN401 - JSON
    """Returns JSON in which every object has one key, its kind."""
    match value:
        case Alike():
            return {"alike": value.value}
        case None | bool() | int() | float() | str():
            return value
        case tuple():
            return [_packed(one, blobs) for one in value]
        case list():
            return {"list": [_packed(one, blobs) for one in value]}
        case bytes():
            blobs.append(value)
            return {"bytes": len(value)}
        case np.ndarray():
            array = np.ascontiguousarray(value)
            blobs.append(array.reshape(-1).view(np.uint8).data)
            return {"array": [array.dtype.str, *value.shape]}
        case slice():
            return {"slice": [value.start, value.stop, value.step]}
        case dict():
            return {"dict": [[key, _packed(one, blobs)] for key, one in value.items()]}
    if (name := _NAMES.get(type(value))) is None:
        raise TypeError(f"no message has a {type(value).__name__}")
    fields = [getattr(value, field.name) for field in dataclasses.fields(value)]  # type: ignore[arg-type]
    return {name: [_packed(one, blobs) for one in fields]}


class _Reader:
    """Reads JSON of `_packed`, and the bytes behind it in their order."""

    def __init__(self, blobs: memoryview) -> None:
        self._blobs = blobs
        self._kinds: dict[str, Callable[[Any], object]] = {
            "alike": Alike,
            "bytes": lambda count: bytes(self._take(count)),
            "array": self._array,
            "list": lambda values: list(map(self.unpacked, values)),
            "slice": lambda parts: slice(*parts),
            "dict": lambda pairs: {key: self.unpacked(value) for key, value in pairs},
        }

    def unpacked(self, value: Any) -> Any:  # noqa: ANN401 - JSON, and what it stands for
        match value:
            case list():
                return tuple(map(self.unpacked, value))
            case dict():
                ((kind, content),) = value.items()
                if kind in self._kinds:
                    return self._kinds[kind](content)
                made = _CLASSES[kind]
                names = [field.name for field in dataclasses.fields(made)]
                values = map(self.unpacked, content)
                return made(**dict(zip(names, values, strict=True)))
        return value

    def _array(self, form: list[Any]) -> np.ndarray[Any, Any]:
        dtype, *shape = form
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ValueError(f"an array of {dtype}")
        flat = np.frombuffer(self._take(int(np.prod(shape)) * kind.itemsize), kind)
        return flat.reshape(shape).copy()  # writable, as torch wants it

    def _take(self, count: int) -> memoryview:
        if not 0 <= count <= len(self._blobs):
            raise ValueError(f"{count} bytes, and {len(self._blobs)} are left")
        taken, self._blobs = self._blobs[:count], self._blobs[count:]
        return taken
