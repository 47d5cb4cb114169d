"""Messages between stages as bytes."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import TransferError
from millrace.core.kv.kvp_pass import RemoteRows
from millrace.core.kv.layout import KvLayout
from millrace.engine.kv.page_table import TableDelta
from millrace.engine.model.stage import Stage
from millrace.engine.parallel.commands import Load, RingPass, Tables
from millrace.engine.pipeline.messages import (
    LinkReply,
    Packed,
    PartialMessage,
    PassOrder,
    PassStart,
    RemoteCall,
    RingStart,
    Step,
)
from millrace.instance.stages.remote.codec import decode, encode
from millrace.instance.stages.stage_process import Follow, Lead, Met
from millrace.transfer.activations import Inlet
from millrace.transfer.transport.regions import Memory

LAYOUT = KvLayout(
    model_hash="model-a",
    dtype="bfloat16",
    num_layers=4,
    num_kv_heads=2,
    head_dim=8,
    page_tokens=16,
    head_start=0,
    head_count=2,
    num_pages=7,
)
TABLES = Tables(
    {
        "token_ids": np.arange(5, dtype=np.int64),
        "page_table": np.zeros((0, 3), dtype=np.int32),
        "lens": np.array([[1, 2], [3, 4]], dtype=np.int32)[:, ::-1],
        "mask": np.array([True, False]),
    },
    (RemoteRows(worker="kvp-0", shard=1 << 60, first_row=0, num_rows=3, first_position=9),),
)
HEADS = torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4).transpose(0, 1)
PART = PartialMessage(slice(0, 3), Packed.of(HEADS), Packed.of(torch.tensor(0.5)))
RING = RingPass(
    rank=1,
    size=2,
    token_ids=np.arange(3),
    positions=np.arange(3) + 7,
    slots=np.arange(3) * 2,
    blocks=((np.zeros(2, np.int32), np.ones(2, np.int32)),),
    last_layer=True,
    want_logits=False,
    want_hidden=True,
)
MESSAGES = [
    Load(folder="m", dtype="auto", load_format="auto", seed=3, stage=Stage(1, 2)),
    PassStart(number=1, name="r", tables=TABLES, is_cut=True, kv_only=False, reports_layers=True),
    RingStart(2, "r", RING),
    Step(3),
    LinkReply(True),
    LinkReply((PART, PartialMessage(Packed.of(torch.arange(2)), PART.out, PART.lse))),
    PassOrder(("", "a\ud7ffb", "c")),
    RemoteCall(4, None),
    RemoteCall(4, Packed.of(HEADS)),
    Met("stages-1", bytes(range(256))),
    Follow(Met("stages-0", b"")),
    Lead(Inlet(agent_metadata=b"metadata", region=1, slot_bytes=1 << 40, link=9)),
    TableDelta((4, 2), np.array([1, 5]), np.array([3, -1], dtype=np.int32)),
    LAYOUT,
    EngineConfig(kv_bytes=5, stages=2),
    # of a rank's agent
    (7, "write", ("peer", (np.arange(3), np.arange(3), np.arange(3)), b"note", 0, 1)),
    (7, Memory(1 << 47, 5, 0), "", False),
    (8, None, "it is gone: \u20ac", True),
    ("open", (1 << 60, [3, 1, 2], 0, 96), False),
    ([(1,), [2.5, "a"], []], ""),
    (9, 0.25, "", False),
]


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, tuple | list):
        assert isinstance(other, type(one))
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in names
        )
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_a_message_comes_back_as_it_was(message: object) -> None:
    assert same(message, decode(encode(message)))


def test_tensors_keep_their_type_and_can_be_written() -> None:
    found = decode(encode(Packed.of(HEADS)))
    assert torch.equal(found.tensor(), HEADS)
    assert found.tensor().dtype == torch.bfloat16
    tables = decode(encode(TABLES))
    tables.arrays["token_ids"][0] = 9  # torch warns of arrays that can't be written


def test_no_other_object_goes_over_the_wire() -> None:
    with pytest.raises(TypeError, match="no message has a PosixPath"):
        encode((1, Path("a")))
    with pytest.raises(TypeError):
        encode(np.array([object()]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1",
        b"\xff\xff\xff\xff{}",
        pickle.dumps(Step(3)),
        b"\x0d\0\0\0" + b'{"os.system":1}'[:13],
        b"\x17\0\0\0" + b'{"builtins.eval":["1"]}',
        b"\x0c\0\0\0" + b'{"bytes": 9}',
        b"\x0d\0\0\0" + b'{"bytes": -1}',
        b"\x12\0\0\0" + b'{"array":["|O",1]}' + bytes(8),
        b"\x13\0\0\0" + b'{"array":["<i8",9]}' + bytes(8),
        b"\x1d\0\0\0" + b'{"messages.Step":[1,2,3,4,5]}',
        b"\x17\0\0\0" + b'{"array":["<i8",-1,-9]}' + bytes(72),
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(TransferError, match="not a message between stages"):
        decode(data)
