"""Checkpoint files that anybody may have written: a ModelError, or tensors; nothing else."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save

from millrace.core.errors import ModelError
from millrace.engine.model.weights.checkpoint import Checkpoint
from support.damaged_json import damaged

WHOLE = save({"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(4)})
HEADER_BYTES = int.from_bytes(WHOLE[:8], "little")
HEADER = json.loads(WHOLE[8 : 8 + HEADER_BYTES])
DATA = WHOLE[8 + HEADER_BYTES :]


def read(content: bytes) -> None:
    """Reads every tensor that the file says it has."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        try:
            checkpoint = Checkpoint(Path(folder))
            for name in checkpoint:
                (shard,) = checkpoint.shards
                checkpoint.tensor(name, shard.entries[name].shape).sum()
            checkpoint.close()
        except ModelError as error:
            assert str(path) in str(error)


def of_header(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + DATA


def test_a_whole_file_has_its_tensors() -> None:
    read(WHOLE)


@given(st.binary(max_size=200))
@example(b"\xff" * 8)
@example((8).to_bytes(8, "little") + b"[" * 8)
@example((100_000).to_bytes(8, "little") + b"[" * 100_000)
def test_any_bytes(content: bytes) -> None:
    read(content)


@given(damaged(HEADER))
@example({"a": {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 24]}})
@example({"a": {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]}})
@example({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 24]}})
def test_any_header(header: object) -> None:
    read(of_header(header))


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_any_changed_byte(at: int, flip: int) -> None:
    read(WHOLE[:at] + bytes([WHOLE[at] ^ flip]) + WHOLE[at + 1 :])


@given(st.integers(0, len(WHOLE) - 1))
def test_any_truncation(length: int) -> None:
    read(WHOLE[:length])
