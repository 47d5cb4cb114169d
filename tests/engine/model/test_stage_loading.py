"""Stages hold runs of layers: together the whole model, each nothing of another stage."""

from __future__ import annotations

import pytest
import torch

from millrace.core.errors import ConfigError
from millrace.engine.model.loader import load_model
from millrace.engine.model.stage import Stage
from millrace.engine.model.tp_shard import TpShard
from support.tiny_models import model_folder


def parts(name: str, count: int, **options: object):
    return [
        load_model(model_folder(name), device="cpu", stage=Stage(i, count), **options)
        for i in range(count)
    ]


@pytest.mark.parametrize("options", [{}, {"load_format": "dummy", "seed": 3}])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "llama3-rope-tied"])
def test_stages_have_the_whole_models_layers_between_them(name, options) -> None:
    whole = load_model(model_folder(name), device="cpu", **options)
    count = min(2, whole.config.num_layers)
    stages = parts(name, count, **options)
    held = [layer for stage in stages for layer in stage.weights.layers]
    assert len(held) == whole.config.num_layers
    for ours, theirs in zip(held, whole.weights.layers, strict=True):
        assert torch.equal(ours.qkv, theirs.qkv) and torch.equal(ours.o, theirs.o)
    assert [list(stage.layers) for stage in stages] == [
        list(Stage(i, count).layers(whole.config.num_layers)) for i in range(count)
    ]
    assert {stage.hash for stage in stages} == {whole.hash}
    assert torch.equal(stages[0].weights.embedding, whole.weights.embedding)
    assert torch.equal(stages[0].weights.lm_head, whole.weights.lm_head)
    for later in stages[1:]:
        assert later.weights.embedding is later.weights.lm_head is later.weights.final_norm is None
    sizes = [stage.weights.num_bytes for stage in stages]
    assert sum(sizes) == whole.weights.num_bytes


def test_a_stage_knows_its_layers_windows_and_experts() -> None:
    whole = load_model(model_folder("qwen3-moe"), device="cpu").config
    for stage in parts("qwen3-moe", 2):
        held = stage.layers
        assert stage.config.num_layers == len(held) == len(stage.weights.layers)
        assert stage.config.sliding_windows == whole.sliding_windows[held.start : held.stop]
        assert [stage.config.is_moe(i) for i in range(len(held))] == [whole.is_moe(i) for i in held]


def test_a_rank_of_a_stage_has_its_share_of_the_stages_layers() -> None:
    stage = load_model(model_folder("llama"), device="cpu", stage=Stage(1, 2))
    rank = load_model(model_folder("llama"), device="cpu", stage=Stage(1, 2), shard=TpShard(1, 2))
    assert len(rank.weights.layers) == len(stage.weights.layers)
    theirs = stage.weights.layers[0].down
    assert torch.equal(rank.weights.layers[0].down, theirs[:, theirs.shape[1] // 2 :])


def test_more_stages_than_layers_are_refused() -> None:
    layers = load_model(model_folder("llama"), device="cpu").config.num_layers
    with pytest.raises(ConfigError, match=f"engine.stages is {layers + 1}"):
        load_model(model_folder("llama"), device="cpu", stage=Stage(0, layers + 1))
    assert [list(Stage(i, 2).layers(5)) for i in range(2)] == [[0, 1], [2, 3, 4]]
