"""Tiny random models that a whole stack can serve: a `tiny_models` folder with a tokenizer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from support.tiny_models import VOCAB, model_folder

SPECIALS = 8  # ids 0..7; bytes follow, then filler tokens up to the vocabulary's size

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def served_folder(name: str) -> Path:
    """The variant's folder with a byte-level tokenizer of `VOCAB` ids and a chat template."""
    folder = model_folder(name)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [f"<special{i}>" for i in range(SPECIALS)]
    vocab = {token: i for i, token in enumerate([*names, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(n, special=True) for n in names])
    tokenizer.add_tokens([f"<filler{i}>" for i in range(len(vocab), VOCAB)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": names[1],
                "eos_token": names[2],
                "chat_template": CHAT_TEMPLATE,
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        )
    )
    return folder
