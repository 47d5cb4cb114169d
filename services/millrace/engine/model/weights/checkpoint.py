"""A folder of safetensors files: headers checked first, tensors read from a memory map.

A safetensors file is an 8-byte little-endian header length, the header (a JSON object of name ->
{dtype, shape, data_offsets}) and the data. Headers are read here, so that a damaged folder ends
start-up with one clear line and a model can be named by a hash without reading its weights; the
tensors themselves come from the safetensors library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from millrace.core.errors import ModelError
from millrace.engine.model.config import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SERVED_DTYPES = ("F32", "BF16", "F16", "F64")
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of one tensor in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One safetensors file, its header already checked against its size."""

    path: Path
    header: bytes
    size_bytes: int
    entries: dict[str, TensorEntry]

    @classmethod
    def open(cls, path: Path) -> CheckpointFile:
        """Opens a file.

        Raises ModelError when it is missing, truncated or not a safetensors file.
        """
        try:
            size_bytes = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size_bytes < 8 or not 0 < length <= min(_MAX_HEADER_BYTES, size_bytes - 8):
                    raise ModelError(
                        f"{path}: truncated or not a safetensors file: its header should have "
                        f"{length} bytes, the file has {size_bytes}"
                    )
                header = file.read(length)
        except OSError as error:
            raise ModelError(f"{path}: can't be read: {error.strerror}") from error
        entries = _entries(path, header)
        wanted = max((entry.stop for entry in entries.values()), default=8 + length)
        if wanted > size_bytes:
            raise ModelError(f"{path}: truncated: expected {wanted} bytes, found {size_bytes}")
        return cls(path, header, size_bytes, entries)


class Checkpoint:
    """The tensors of a folder by name."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError when a shard that the index names is missing or damaged."""
        self.folder = folder
        self.shards = tuple(CheckpointFile.open(path) for path in _shard_paths(folder))
        self._shard_of = {name: shard for shard in self.shards for name in shard.entries}
        self._files: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a read-only view into the file's memory map, in the file's dtype.

        Raises ModelError when the tensor is missing, has another shape or a dtype that isn't
        served.
        """
        shard = self._shard_of.get(name)
        if shard is None:
            raise ModelError(f"{self.folder}: tensor {name} {list(shape)} is missing")
        entry = shard.entries[name]
        if entry.shape != shape:
            raise ModelError(
                f"{shard.path}: tensor {name} has shape {list(entry.shape)}, expected {list(shape)}"
            )
        if entry.dtype not in _SERVED_DTYPES:
            raise ModelError(
                f"{shard.path}: tensor {name} has dtype {entry.dtype}, "
                f"expected one of {', '.join(_SERVED_DTYPES)}"
            )
        tensor: torch.Tensor = self._file(shard).get_tensor(name)
        return tensor

    def close(self) -> None:
        self._files.clear()

    def _file(self, shard: CheckpointFile) -> Any:  # noqa: ANN401 - safetensors has no types for its handle
        if shard.path not in self._files:
            try:
                self._files[shard.path] = safe_open(shard.path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                reason = " ".join(str(error).split())
                raise ModelError(f"{shard.path}: damaged safetensors file: {reason}") from error
        return self._files[shard.path]


def _shard_paths(folder: Path) -> list[Path]:
    index_path = folder / INDEX
    if not index_path.is_file():
        if not (folder / SINGLE).is_file():
            raise ModelError(f"{folder}: neither {SINGLE} nor {INDEX} is there")
        return [folder / SINGLE]
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index_path}: weight_map must be an object of tensor name -> file name")
    paths = []
    for name in sorted({str(file) for file in weight_map.values()}):
        if Path(name).name != name:
            raise ModelError(f"{index_path}: shard {name!r} must lie in the folder itself")
        if not (folder / name).is_file():
            raise ModelError(f"{index_path}: names shard {name}, which is missing")
        paths.append(folder / name)
    return paths


def _entries(path: Path, header: bytes) -> dict[str, TensorEntry]:
    try:
        raw = json.loads(header)
        data_start = 8 + len(header)
        return {
            name: _entry(value, data_start) for name, value in raw.items() if name != "__metadata__"
        }
    except (
        *(ValueError, TypeError, KeyError, AttributeError),
        *(RecursionError, OverflowError),  # nested too deeply; an infinite size
    ) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{path}: malformed safetensors header: {reason}") from error


def _entry(value: Any, data_start: int) -> TensorEntry:  # noqa: ANN401 - JSON, checked here
    dtype, shape = str(value["dtype"]), tuple(int(n) for n in value["shape"])
    start, stop = (int(n) for n in value["data_offsets"])
    if not 0 <= start <= stop:
        raise ValueError(f"data_offsets {start}..{stop}")
    return TensorEntry(dtype, shape, data_start + start, data_start + stop)
