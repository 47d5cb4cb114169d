"""Checks for tensors of a checkpoint that the model has no place for.

A bias or a norm that is left out changes every number, so such a checkpoint is refused. Two kinds
are left out with a warning, as transformers does: the rotary frequencies, which old checkpoints
keep in each layer and the config determines, and an output head that repeats the tied embedding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from millrace.core.errors import ModelError
from millrace.engine.model.weights.checkpoint import Checkpoint
from millrace.engine.model.weights.fused import WeightSpec

log = logging.getLogger(__name__)

_DETERMINED = "rotary_emb.inv_freq"  # by the config
_HEAD = "lm_head.weight"
_NAMED = 4  # names in a message; the others are counted


def check_leftover(checkpoint: Checkpoint, specs: Iterable[WeightSpec]) -> None:
    """Compares the checkpoint with the weights of the whole model, whatever part of it is loaded.

    `specs`: the embedding first.

    Raises ModelError that names the tensors without which the model would compute other numbers.
    """
    specs = list(specs)
    taken = {part.tensor for spec in specs for part in spec.parts}
    left = sorted(name for name in checkpoint if name not in taken)
    harmless = [name for name in left if name.endswith(_DETERMINED)]
    if _HEAD in left and _is_tied(checkpoint, specs[0]):
        harmless.append(_HEAD)
    if wrong := [name for name in left if name not in set(harmless)]:
        raise ModelError(
            f"{checkpoint.folder}: this model has no place for {_names(wrong)}; without them its "
            "output would be wrong. config.json and the weights don't belong together, or need "
            "what is not served"
        )
    if harmless:
        log.warning("%s: not needed, and not read: %s", checkpoint.folder, _names(harmless))


def _is_tied(checkpoint: Checkpoint, embedding: WeightSpec) -> bool:
    """Returns whether the output head is the embedding, as a config with tied embeddings says.

    Raises ModelError when it is another table.
    """
    table = embedding.parts[0]
    head = checkpoint.tensor(_HEAD, table.shape)
    if not torch.equal(head, checkpoint.tensor(table.tensor, table.shape)):
        raise ModelError(
            f"{checkpoint.folder}: {_HEAD} differs from {table.tensor}, but config.json has "
            "tie_word_embeddings: true; set it to false"
        )
    return True


def _names(tensors: list[str]) -> str:
    shown = ", ".join(tensors[:_NAMED])
    more = len(tensors) - _NAMED
    return f"{shown} and {more} more tensors" if more > 0 else shown
