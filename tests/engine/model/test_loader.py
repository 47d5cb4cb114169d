from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.core.errors import ModelError
from millrace.engine.model.loader import load_model, model_hash
from millrace.engine.model.stage import Stage
from millrace.engine.model.tp_shard import TpShard
from support.tiny_models import model_folder, oracle

SHARDED = "llama-mha-sharded"
INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a copy of a single-file model, to be damaged."""
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "llama"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder(SHARDED), tmp_path / "sharded"))


def edit_tensors(file: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(file), **{n: t for n, t in change.items() if t is not None}}
    save_file({n: t for n, t in tensors.items() if change.get(n, t) is not None}, file)


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder, device="cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fused_weights_hold_the_checkpoints_tensors() -> None:
    model, theirs = load_model(model_folder(SHARDED), device="cpu"), oracle(SHARDED).model
    assert (model_folder(SHARDED) / INDEX).is_file()
    state = theirs.state_dict()
    for i, layer in enumerate(model.weights.layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        parts = [state[f"{attention}.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(layer.qkv, torch.cat(parts))
        assert layer.gate_up is not None
        parts = [state[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up")]
        assert torch.equal(layer.gate_up, torch.cat(parts))
    assert torch.equal(model.weights.lm_head, state["lm_head.weight"])
    parameters = sum(p.numel() for p in theirs.parameters())
    assert model.weights.num_bytes == parameters * 4


def test_tied_embeddings_are_one_tensor_and_dtypes_convert() -> None:
    model = load_model(model_folder("llama3-rope-tied"), device="cpu", dtype="bfloat16")
    assert model.weights.lm_head is model.weights.embedding
    exact = load_model(model_folder("llama3-rope-tied"), device="cpu")
    assert torch.equal(model.weights.embedding, exact.weights.embedding.bfloat16())


def test_progress_rises_to_one() -> None:
    shares: list[float] = []
    load_model(model_folder("mixtral"), device="cpu", progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 10


def test_a_truncated_file_is_named_with_both_sizes(folder: Path) -> None:
    file = folder / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 100)
    assert refused(folder) == f"{file}: truncated: expected {size} bytes, found {size - 100}"


@pytest.mark.parametrize("size", [0, 5, 8, 40])
def test_a_file_cut_inside_its_header_is_refused(folder: Path, size: int) -> None:
    os.truncate(folder / "model.safetensors", size)
    assert "model.safetensors: truncated or not a safetensors file" in refused(folder)


def test_a_malformed_header_is_refused(folder: Path) -> None:
    for header in (b"{]", b"[1, 2]", b'{"a": {"dtype": "F32"}}', b'{"a": 3}'):
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert "model.safetensors: malformed safetensors header" in refused(folder)


def test_headers_that_contradict_themselves_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = "F16"
    edited = json.dumps(header).encode()
    file.write_bytes(len(edited).to_bytes(8, "little") + edited + content[8 + length :])
    assert "damaged safetensors file" in refused(folder)


def test_a_missing_tensor_is_named_with_its_shape(folder: Path) -> None:
    edit_tensors(folder / "model.safetensors", {DOWN: None})
    assert refused(folder) == f"{folder}: tensor {DOWN} [48, 80] is missing"


def test_a_tensor_of_another_shape_is_named_with_both(folder: Path) -> None:
    file = folder / "model.safetensors"
    edit_tensors(file, {DOWN: torch.zeros(48, 81)})
    assert refused(folder) == f"{file}: tensor {DOWN} has shape [48, 81], expected [48, 80]"


def test_a_tensor_of_a_dtype_that_is_not_served_is_named(folder: Path) -> None:
    edit_tensors(folder / "model.safetensors", {DOWN: torch.zeros(48, 80, dtype=torch.int8)})
    assert f"tensor {DOWN} has dtype I8, expected one of F32" in refused(folder)


def test_tensors_that_no_layer_takes_are_refused_by_name(folder: Path) -> None:
    """A bias that the config does not name would be left out of every number."""
    bias = "model.layers.{}.self_attn.q_proj.bias"
    edit_tensors(folder / "model.safetensors", {bias.format(1): torch.zeros(48)})
    assert f"{folder}: this model has no place for {bias.format(1)}; without" in refused(folder)
    more = {bias.format(i): torch.zeros(48) for i in range(7)}
    edit_tensors(folder / "model.safetensors", more)
    names = ", ".join(bias.format(i) for i in range(4))
    assert f"no place for {names} and 3 more tensors; without them" in refused(folder)


@pytest.mark.parametrize("part", [{"shard": TpShard(0, 2)}, {"stage": Stage(1, 2)}])
def test_a_part_of_a_model_takes_and_refuses_what_the_whole_does(folder: Path, part) -> None:
    load_model(folder, device="cpu", **part)
    edit_tensors(
        folder / "model.safetensors", {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}
    )
    with pytest.raises(ModelError, match=r"no place for model\.layers\.0\.self_attn\.q_norm"):
        load_model(folder, device="cpu", **part)


def test_what_the_config_determines_is_left_out_with_a_warning(folder: Path, caplog) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder / "model.safetensors", {name: torch.ones(8)})
    load_model(folder, device="cpu")
    assert f"{folder}: not needed, and not read: {name}" in caplog.text


def test_a_head_beside_tied_embeddings_must_be_the_embedding(tmp_path: Path, caplog) -> None:
    folder = Path(shutil.copytree(model_folder("llama3-rope-tied"), tmp_path / "tied"))
    file = folder / "model.safetensors"
    table = load_file(file)["model.embed_tokens.weight"]
    edit_tensors(file, {"lm_head.weight": table.clone()})
    load_model(folder, device="cpu")
    assert "not needed, and not read: lm_head.weight" in caplog.text
    edit_tensors(file, {"lm_head.weight": table + 1})
    assert "lm_head.weight differs from model.embed_tokens.weight, but" in refused(folder)


def test_an_index_that_names_a_missing_shard_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert refused(sharded) == f"{sharded / INDEX}: names shard {shard.name}, which is missing"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON"),
        ("{}", "weight_map must be an object"),
        ('{"weight_map": {"a": "../escape.safetensors"}}', "must lie in the folder itself"),
    ],
)
def test_a_broken_index_is_refused(sharded: Path, content: str, message: str) -> None:
    (sharded / INDEX).write_text(content)
    assert message in refused(sharded)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refused(folder) == f"{folder}: neither model.safetensors nor {INDEX} is there"


def test_dummy_weights_need_only_a_config_and_depend_only_on_the_seed(tmp_path: Path) -> None:
    shutil.copy(model_folder("qwen3-moe") / "config.json", tmp_path)
    first, again, other = (
        load_model(tmp_path, device="cpu", load_format="dummy", seed=seed) for seed in (3, 3, 4)
    )
    assert torch.equal(first.weights.embedding, again.weights.embedding)
    assert not torch.equal(first.weights.embedding, other.weights.embedding)
    assert first.hash == again.hash != other.hash
    layer = first.weights.layers[2]
    assert layer.experts_down is not None
    assert 0.015 < layer.experts_down.std() < 0.025
    assert 0.9 < layer.input_norm.mean() < 1.1 and 0.05 < layer.input_norm.std() < 0.15
    half = load_model(tmp_path, device="cpu", load_format="dummy", seed=3, dtype="bfloat16")
    assert torch.equal(half.weights.layers[1].qkv, first.weights.layers[1].qkv.bfloat16())


def test_hash_names_the_weights(folder: Path, sharded: Path) -> None:
    before = model_hash(folder)
    assert before == model_hash(model_folder("llama")) == load_model(folder, device="cpu").hash
    assert len({before, model_hash(sharded), model_hash(folder, load_format="dummy")}) == 3
    edit_tensors(folder / "model.safetensors", {DOWN: torch.ones(48, 80)})
    assert model_hash(folder) != before
    config = folder / "config.json"
    after = model_hash(folder)
    config.write_text(config.read_text() + "\n")
    assert model_hash(folder) != after


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ModelError, match="device 'abacus' is not one torch knows"):
        load_model(model_folder("llama"), device="abacus")


def test_the_engine_imports_with_torch_numpy_safetensors_and_tokenizers_alone() -> None:
    code = (
        "import importlib, pkgutil, sys, millrace.engine as e\n"
        "for m in pkgutil.walk_packages(e.__path__, 'millrace.engine.'):\n"
        "    importlib.import_module(m.name)\n"
        "found = {n.split('.')[0] for n in sys.modules}\n"
        "print(sorted(found & {'transformers', 'huggingface_hub', 'grpc', 'redis', 'fastapi',\n"
        "    'pydantic', 'orjson', 'uvloop', 'nixl_cu12', 'nixl_cu13',\n"
        "    'rich', 'typer', 'google'}))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
