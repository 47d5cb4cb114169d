"""Loads a model into memory by its name: a folder, a hub id, or random weights of its shape."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import ModelError
from millrace.engine.kv.host_memory import host_zeros
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.stage import ALONE, Stage
from millrace.engine.model.tp_shard import WHOLE, KvHeads, TpShard
from millrace.engine.model.weights.checkpoint import Checkpoint
from millrace.engine.model.weights.dummy import RandomWeights
from millrace.engine.model.weights.fused import (
    LayerWeights,
    ModelWeights,
    WeightSpec,
    layer_specs,
    outer_specs,
)
from millrace.engine.model.weights.leftover import check_leftover
from millrace.model_folder import resolve_model

_SAMPLE_BYTES = 4096
_SAMPLES_A_FILE = 16
_ALIGNED = 64  # elements: a weight starts on a cache line


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, or a rank's or a stage's share of it, ready to run: its shape, weights and places.

    ``config`` has the heads, widths and layers that are loaded; ``kv_heads`` says which of the
    model's heads, ``layers`` which of its layers.
    """

    config: ModelConfig
    kv_heads: KvHeads
    layers: range
    weights: ModelWeights
    device: torch.device
    dtype: torch.dtype
    hash: str


def load_model(
    model: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    shard: TpShard = WHOLE,
    stage: Stage = ALONE,
) -> Model:
    """Loads a model; arguments as in `EngineConfig`. `progress` gets the share done, 0 to 1.

    With ``load_format="dummy"`` only config.json is needed and `seed` fixes the weights, the same
    in every process and on every device. For a rank's `shard` or a `stage` only its weights are
    read and kept. Raises ModelError in one line, and ConfigError for a model that can't be split
    so.
    """
    folder = resolve_model(model)
    config = ModelConfig.from_folder(folder)
    shard.check(config)
    stage.check(config)
    layers_held = stage.layers(config.num_layers)
    target = _device(device)
    torch_dtype: torch.dtype = getattr(torch, config.dtype if dtype == "auto" else dtype)
    specs = [outer_specs(config), *(layer_specs(config, i) for i in range(config.num_layers))]
    wanted = [stage.is_first, *(i in layers_held for i in range(config.num_layers))]
    pieces = [
        _pieces(group, config, shard if is_wanted else None)
        for group, is_wanted in zip(specs, wanted, strict=True)
    ]
    held = [piece for group in pieces for piece, _ in group.values() if piece is not None]
    total = sum(piece.elements for piece in held)
    rooms = _rooms(held, torch_dtype, target)
    done = 0

    def build(group: _Pieces) -> dict[str, torch.Tensor]:
        nonlocal done
        built = {}
        for name, (piece, whole) in group.items():
            if piece is None:
                source.skip(whole)
                continue
            weight = next(rooms)
            source.fill(weight, piece, whole)
            built[name] = weight
            done += piece.elements
            if progress is not None:
                progress(done / total)
        return built

    source: _CheckpointSource | RandomWeights
    if load_format == "dummy":
        source = RandomWeights(seed)
    else:
        checkpoint = Checkpoint(folder)
        check_leftover(checkpoint, (spec for group in specs for spec in group.values()))
        source = _CheckpointSource(checkpoint)
    outer = build(pieces[0])
    built = [build(group) for group in pieces[1:]]
    layers = tuple(LayerWeights(**weights) for weights in built if weights)
    if stage.is_first and "lm_head" not in outer:
        tied, rows = outer["embedding"], slice(*shard.vocabulary(config.vocab_size))
        outer["lm_head"] = tied if shard.size == 1 else tied[rows]
    return Model(
        config=shard.config(stage.config(config)),
        layers=layers_held,
        kv_heads=shard.kv_heads(config.num_kv_heads),
        weights=ModelWeights(layers=layers, **outer),
        device=target,
        dtype=torch_dtype,
        hash=model_hash(folder, load_format=load_format, seed=seed),
    )


def model_hash(folder: str | Path, *, load_format: str = "auto", seed: int = 0) -> str:
    """Returns 64 hex digits that name a model's weights; KV of different hashes must never mix.

    SHA-256 over config.json and, for every shard, its name, size, header and a fixed sample of its
    bytes, so that hashing a model of hundreds of gigabytes takes milliseconds. The hash of dummy
    weights covers config.json and the seed. Raises ModelError as `load_model` does.
    """
    folder = Path(folder)
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        if load_format == "dummy":
            digest.update(f"dummy {seed}".encode())
            return digest.hexdigest()
        for shard in Checkpoint(folder).shards:
            digest.update(f"{shard.path.name} {shard.size_bytes} ".encode())
            digest.update(shard.header)
            step = max(shard.size_bytes // _SAMPLES_A_FILE, 1)
            with shard.path.open("rb") as file:
                for offset in range(0, shard.size_bytes, step):
                    file.seek(offset)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"{error.filename}: can't be read: {error.strerror}") from error
    return digest.hexdigest()


_Pieces = dict[str, tuple[WeightSpec | None, WeightSpec]]
"""What is held of each weight (None: nothing), and the weight."""


def _pieces(group: dict[str, WeightSpec], config: ModelConfig, shard: TpShard | None) -> _Pieces:
    """Returns (piece, whole) by name. Without `shard` another stage has the group: no piece."""
    if shard is None:
        return {name: (None, spec) for name, spec in group.items()}
    return {name: (shard.piece(config, name, spec), spec) for name, spec in group.items()}


class _CheckpointSource:
    """Fills fused weights from a folder's safetensors files, converting dtypes as it copies."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def fill(self, weight: torch.Tensor, spec: WeightSpec, whole: WeightSpec) -> None:
        for part in spec.parts:
            tensor = self._checkpoint.tensor(part.tensor, part.shape)
            weight[part.index].copy_(tensor[part.source])

    def skip(self, spec: WeightSpec) -> None:
        """Reads nothing of a weight that another rank or stage has."""


def _rooms(
    specs: Iterable[WeightSpec], dtype: torch.dtype, device: torch.device
) -> Iterator[torch.Tensor]:
    """Allocates each weight; on the host in one piece, so that small weights lie in huge pages
    too."""
    specs = list(specs)
    if device.type != "cpu":
        for spec in specs:
            yield torch.empty(spec.shape, dtype=dtype, device=device)
        return
    starts = [0, *accumulate(ceil_div(spec.elements, _ALIGNED) * _ALIGNED for spec in specs)]
    whole = host_zeros((starts[-1],), dtype)
    for spec, start in zip(specs, starts, strict=False):
        yield whole[start : start + spec.elements].view(spec.shape)


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device {device!r} is not one torch knows") from error
