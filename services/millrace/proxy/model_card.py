"""Reads the facts that the proxy needs of a model, without loading the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from millrace.core.errors import ModelError, reason_of
from millrace.model_folder import DESCRIPTION, resolve_model
from millrace.proxy.request.options import EmbeddingFacts, SamplingDefaults

_DEFAULT_CONTEXT_TOKENS = 2048
#: More tokens than any model has: tables of a tokenizer have an entry for each.
_MOST_TOKENS = 1 << 22
_NOT_A_NUMBER = (KeyError, TypeError, ValueError, OverflowError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The facts of one model. `context_tokens` counts prompt and completion; ids < `vocab_size`."""

    folder: Path
    vocab_size: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    special_tokens: Mapping[str, str]
    chat_template: str | None
    #: tokenizer_config.json; empty if the model has none.
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    embedding: EmbeddingFacts = field(default_factory=EmbeddingFacts)


def read_model_card(model: str | Path, max_context_tokens: int = 0) -> ModelCard:
    """Reads the small files of a Hugging Face folder; fetches them first if `model` is a hub id.

    `max_context_tokens` limits the model's own context (0: no limit). Raises ModelError naming the
    file.
    """
    folder = resolve_model(model, DESCRIPTION)
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config", config)
    generation = _read_json(folder / "generation_config.json", optional=True)
    tokenizer = _read_json(folder / "tokenizer_config.json", optional=True)
    path = folder / "config.json"
    if not isinstance(text_config, dict):
        raise ModelError(f"{path}: text_config must be a JSON object")
    try:
        vocab_size = int(text_config["vocab_size"])
    except _NOT_A_NUMBER as error:
        raise ModelError(f"{path} has no usable vocab_size") from error
    if not 0 < vocab_size <= _MOST_TOKENS:
        raise ModelError(f"{path}: vocab_size is {vocab_size}; it must be 1 to {_MOST_TOKENS}")
    try:
        context = int(text_config.get("max_position_embeddings", _DEFAULT_CONTEXT_TOKENS))
        hidden_size = int(text_config.get("hidden_size", 0))
        dimensions = _ids(config.get("matryoshka_dimensions"))
        eos_token_ids = _ids(generation.get("eos_token_id", config.get("eos_token_id")))
        defaults = _sampling_defaults(generation)
    except _NOT_A_NUMBER as error:
        raise ModelError(f"a value of {path} or generation_config.json: {error}") from error
    if max_context_tokens:
        context = min(context, max_context_tokens)
    return ModelCard(
        folder=folder,
        vocab_size=vocab_size,
        context_tokens=context,
        eos_token_ids=eos_token_ids,
        defaults=defaults,
        special_tokens=_special_tokens(tokenizer),
        chat_template=_chat_template(folder, tokenizer),
        tokenizer_config=tokenizer,
        embedding=EmbeddingFacts(
            pooling=_pooling(folder),
            hidden_size=hidden_size,
            dimensions=dimensions,
        ),
    )


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"can't read {path}: {reason_of(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _pooling(folder: Path) -> str:
    """Returns how the model's sentence-transformers files pool hidden states; "last" without them.

    modules.json lists the modules with their types and folders. The pooling module's config.json
    has a flag per mode (`pooling_mode_lasttoken`), or the mode's name (`pooling_mode`).
    """
    path = folder / "modules.json"
    if not path.exists():
        return "last"
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        paths = [one["path"] for one in modules if str(one["type"]).endswith(".Pooling")]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"can't read {path}: {reason_of(error)}") from error
    if not paths:
        return "last"
    config = _read_json(folder / str(paths[0]) / "config.json")
    named = config.get("pooling_mode")
    flags = [name.removeprefix("pooling_mode_") for name, on in config.items() if on is True]
    modes = [named] if isinstance(named, str) else [f for f in flags if f != "include_prompt"]
    known = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
    return known.get(modes[0], modes[0]) if len(modes) == 1 else "+".join(modes) or "last"


def _ids(value: Any) -> tuple[int, ...]:  # noqa: ANN401 - the file may hold any JSON
    if isinstance(value, int):
        return (value,)
    return tuple(int(i) for i in value) if isinstance(value, list) else ()


def _sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    kinds = asdict(SamplingDefaults())
    given = {
        name: type(usual)(generation[name])
        for name, usual in kinds.items()
        if generation.get(name) is not None
    }
    return SamplingDefaults(**given)


def _special_tokens(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
        token = tokenizer.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            special[name] = content
    return special


def _chat_template(folder: Path, tokenizer: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    legacy = _read_json(folder / "chat_template.json", optional=True).get("chat_template")
    template = tokenizer.get("chat_template", legacy)
    if isinstance(template, list):
        named = {
            str(entry.get("name")): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    return template if isinstance(template, str) else None
