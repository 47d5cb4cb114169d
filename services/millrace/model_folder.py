"""Finds the folder of a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from millrace.core.errors import ModelError
from millrace.home import expanded

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

#: What of a hub's model describes it, without the weights.
DESCRIPTION: Final = ("*.json", "*.jinja")
WHOLE: Final = (*DESCRIPTION, "model*.safetensors", "tokenizer*")


def resolve_model(model: str | Path, files: Sequence[str] = WHOLE) -> Path:
    """Returns the folder of a model: the path itself, else a download of the hub id that it names.

    files: the patterns of the files that are downloaded. Raises ModelError when `model` is neither,
    or the hub can't be reached.
    """
    path = expanded(model)
    if path.is_dir():
        return path
    name = str(model)
    if path.is_absolute() or name.startswith(".") or not _HUB_ID.fullmatch(name):
        raise ModelError(f"{name}: no such model folder")
    try:
        import huggingface_hub  # slow to import, and seldom needed
    except ImportError as error:
        raise ModelError(
            f"{name}: no such folder, and huggingface_hub is not installed to download it"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:  # whatever the hub's client and its network stack raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{name}: no such folder, and the Hugging Face hub did not give it: {reason}"
        ) from error
