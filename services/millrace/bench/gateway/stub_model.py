"""Writes the small files of a model folder that a proxy needs, without weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
HIDDEN_SIZE = 8
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role: ' ~ m['role']) }}{% endif %}"
    "{{ '<|' ~ m['role'] ~ '|>' ~ m['content'] ~ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = """Rivers turn wheels and wheels turn stones. A race of water runs to the mill, and the
mill grinds what the fields gave: wheat, rye, barley. Zürich, naïve café, 東京, 😀."""


def stub_tokenizer(vocab_size: int = 400) -> Tokenizer:
    """Returns a byte-level BPE of `vocab_size` tokens; its post-processor puts <|bos|> first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return tokenizer


def write_stub_model(
    folder: Path,
    *,
    context_tokens: int = 4096,
    vocab_size: int = 400,
    markers: Sequence[str] = (),
) -> Path:
    """Writes config.json, tokenizer.json and tokenizer_config.json; returns the folder.

    `markers` are special tokens beside the usual ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = stub_tokenizer(vocab_size)
    tokenizer.add_special_tokens(list(markers))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN_SIZE,
        "max_position_embeddings": context_tokens,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = {
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder
