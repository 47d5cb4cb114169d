"""The weights and heads that each rank of a group holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millrace.core.errors import ConfigError, ModelError
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.stage_passes import StagePasses
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.loader import Model, load_model
from millrace.engine.model.tp_shard import KvHeads, TpShard
from millrace.engine.model.weights import checkpoint
from millrace.engine.model.weights.fused import LayerWeights
from support.parallel import split_folder
from support.tiny_engine import make_pool
from support.tiny_models import model_folder


def shards(name: str, size: int, load_format: str = "auto") -> list[Model]:
    folder = split_folder(name)
    return [
        load_model(folder, device="cpu", load_format=load_format, shard=TpShard(rank, size))
        for rank in range(size)
    ]


def joined(layers: list[LayerWeights], name: str, axis: int) -> torch.Tensor:
    return torch.cat([getattr(layer, name) for layer in layers], axis)


def blocks(weight: torch.Tensor, sizes: list[int], axis: int = 0) -> list[torch.Tensor]:
    return list(weight.split(sizes, axis))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("size", [2, 4])
def test_pieces_of_a_dense_model_make_up_the_whole(size: int, load_format: str) -> None:
    name = "llama-linear-biased"
    whole = load_model(split_folder(name), device="cpu", load_format=load_format)
    ranks = shards(name, size, load_format)
    config = ranks[0].config
    qkv = [config.q_size, config.kv_size, config.kv_size]
    halves = [config.intermediate_size] * 2
    for i, all_of_it in enumerate(whole.weights.layers):
        layers = [rank.weights.layers[i] for rank in ranks]
        for name, sizes in [("qkv", qkv), ("qkv_bias", qkv), ("gate_up", halves)]:
            pieces = [blocks(getattr(layer, name), sizes) for layer in layers]
            stacked = torch.cat([torch.cat(part) for part in zip(*pieces, strict=True)])
            assert torch.equal(stacked, getattr(all_of_it, name)), name
        assert torch.equal(joined(layers, "o", 1), all_of_it.o)
        assert all_of_it.down is not None
        assert torch.equal(joined(layers, "down", 1), all_of_it.down)
        assert all(torch.equal(layer.post_norm, all_of_it.post_norm) for layer in layers)
        for name in ("o_bias", "down_bias"):
            assert torch.equal(getattr(layers[0], name), getattr(all_of_it, name))
            assert all(getattr(layer, name) is None for layer in layers[1:])
    heads = torch.cat([rank.weights.lm_head for rank in ranks])
    assert torch.equal(heads, whole.weights.lm_head)
    assert {rank.hash for rank in ranks} == {whole.hash}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_experts_are_split_in_width_and_their_router_is_not(load_format: str) -> None:
    name = "qwen3-moe-mixed"
    whole = load_model(split_folder(name), device="cpu", load_format=load_format)
    ranks = shards(name, 4, load_format)
    layer, layers = whole.weights.layers[1], [rank.weights.layers[1] for rank in ranks]
    assert layer.experts_gate_up is not None and layer.experts_down is not None
    halves = [
        piece.experts_gate_up.chunk(2, 1) for piece in layers if piece.experts_gate_up is not None
    ]
    stacked = torch.cat([torch.cat(part, 1) for part in zip(*halves, strict=True)], 1)
    assert torch.equal(stacked, layer.experts_gate_up)
    assert torch.equal(joined(layers, "experts_down", 2), layer.experts_down)
    assert all(torch.equal(piece.router, layer.router) for piece in layers)


def test_a_tied_head_is_a_view_of_the_ranks_rows() -> None:
    rank = shards("llama3-rope-tied", 4)[3]
    table, head = rank.weights.embedding, rank.weights.lm_head
    assert torch.equal(head, table[240:320])
    assert head.data_ptr() == table[240:].data_ptr()


def test_a_vocabulary_that_does_not_divide_leaves_the_last_ranks_fewer_rows() -> None:
    assert [TpShard(rank, 4).vocabulary(10) for rank in range(4)] == [
        (0, 3),
        (3, 6),
        (6, 9),
        (9, 10),
    ]
    assert [TpShard(rank, 4).vocabulary(5) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_heads_are_split_in_order_and_shared_where_ranks_are_more() -> None:
    assert [TpShard(rank, 2).kv_heads(6) for rank in range(2)] == [
        KvHeads(0, 3, 6),
        KvHeads(3, 3, 6),
    ]
    assert [TpShard(rank, 4).kv_heads(2).start for rank in range(4)] == [0, 0, 1, 1]
    assert {TpShard(rank, 4).kv_heads(2).count for rank in range(4)} == {1}


def test_a_rank_reads_no_more_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sharded tensor only a slice is copied, and a bias after the all-reduce not at all."""
    asked: list[str] = []
    tensor = checkpoint.Checkpoint.tensor

    def spy(self: checkpoint.Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        asked.append(name)
        return tensor(self, name, shape)

    monkeypatch.setattr(checkpoint.Checkpoint, "tensor", spy)
    folder = split_folder("llama-linear-biased")
    rank = load_model(folder, device="cpu", shard=TpShard(1, 2))
    assert not [name for name in asked if name.endswith(("o_proj.bias", "down_proj.bias"))]
    whole = load_model(folder, device="cpu")
    split = whole.weights.num_bytes - whole.weights.embedding.nbytes
    assert rank.weights.num_bytes - rank.weights.embedding.nbytes < 0.51 * split


@pytest.mark.parametrize(
    ("size", "change", "message"),
    [
        (4, {"num_kv_heads": 3}, "of 4 does not divide num_key_value_heads, which is 3, nor is"),
        (4, {"num_heads": 6, "num_kv_heads": 2}, "of 4 does not divide num_attention_heads, whi"),
        (2, {"intermediate_size": 81}, "of 2 does not divide intermediate_size, which is 81"),
    ],
)
def test_a_model_that_does_not_split_is_refused(size: int, change: dict, message: str) -> None:
    config = ModelConfig.from_folder(split_folder("mistral-window"))
    with pytest.raises(ConfigError, match=message):
        TpShard(0, size).check(replace(config, **change))


def test_experts_that_do_not_split_are_refused() -> None:
    config = ModelConfig.from_folder(split_folder("qwen3-moe-mixed"))
    assert config.moe is not None
    odd = replace(config, moe=replace(config.moe, intermediate_size=18))
    with pytest.raises(ConfigError, match="does not divide an expert's width, which is 18"):
        TpShard(0, 4).check(odd)


def test_the_loader_refuses_what_does_not_split() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads, which is 3"):
        load_model(model_folder("qwen3"), device="cpu", shard=TpShard(0, 2))


def test_a_pool_of_other_heads_is_refused() -> None:
    whole, rank = (
        load_model(split_folder("mixtral"), device="cpu", shard=s)
        for s in (TpShard(0, 1), TpShard(1, 2))
    )
    with pytest.raises(ModelError, match="head_start is 0, the model needs 2"):
        ModelRunner(StagePasses(rank, make_pool(whole)))
