"""Write the small model as a Hugging Face folder: tokenizer, chat template, weights and configs."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_corpus import documents, plain
from tiny_llama import TinyConfig
from tiny_text import BOS, END, EOS, SPECIAL_TOKENS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

TOKENIZER_DOCUMENTS = 6000
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] not in ['system', 'user', 'assistant'] %}
{{- raise_exception('Unknown role: ' ~ message['role'] ~ '. Use system, user or assistant.') }}
{%- endif %}
{{- '<|' ~ message['role'] ~ '|>' }}
{%- if message['content'] is string %}
{{- message['content'] | trim }}
{%- elif message['content'] %}
{%- for part in message['content'] if part['type'] != 'text' %}
{{- raise_exception('Unknown content part: ' ~ part['type'] ~ '. Use text.') }}
{%- endfor %}
{{- message['content'] | map(attribute='text') | join | trim }}
{%- endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""


def train_tokenizer(seed: int, vocab_size: int) -> Tokenizer:
    """A byte-level BPE with all 256 bytes, so that every text round-trips. Digits stand alone."""
    stream = documents(random.Random(seed))
    texts: list[str] = []
    for _ in range(TOKENIZER_DOCUMENTS):
        text = plain(next(stream))
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\n")
        texts.append(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, special_id(tokenizer, BOS))],
    )
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token. Raises KeyError when the vocabulary lacks it."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise KeyError(token)
    return int(number)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(out: Path, tokenizer: Tokenizer, config: TinyConfig) -> None:
    """tokenizer.json, tokenizer_config.json (with the chat template), and both configs."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": END,
            "pad_token": EOS,
            "additional_special_tokens": [t for t in SPECIAL_TOKENS if t not in (BOS, EOS, END)],
            "model_max_length": config.max_context_tokens,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    bos_id, eos_id, end_id = (special_id(tokenizer, token) for token in (BOS, EOS, END))
    _write_json(
        out / "config.json", config.hf_dict(bos_id=bos_id, eos_ids=[end_id, eos_id], pad_id=eos_id)
    )
    _write_json(
        out / "generation_config.json",
        {
            "bos_token_id": bos_id,
            "eos_token_id": [end_id, eos_id],
            "pad_token_id": eos_id,
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.95,
        },
    )


def write_weights(out: Path, state: Mapping[str, Tensor]) -> None:
    """bfloat16 weights; the output matrix is the embedding and is not stored twice."""
    tensors = {name: weight.to(torch.bfloat16).contiguous() for name, weight in state.items()}
    part = out / "model.safetensors.part"
    save_file(tensors, str(part), metadata={"format": "pt"})
    part.chmod(0o644)
    part.replace(out / "model.safetensors")
