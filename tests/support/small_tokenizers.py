"""Small tokenizers that split texts as those of well-known model families do."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
#: The rules that split a text before tokens are looked for. GPT-2's is the library's own.
RULES = {
    "gpt2": "",
    "llama3": rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
    "qwen": rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",
    "o200k": (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
SPECIAL = ("<|bos|>", "<|im_start|>", "<|im_end|>")
_TEXTS = (
    "The word and the words don't end. A mill's race turns 12 wheels, 1234 stones!\n\n...\n",
    "def mill(stones):\n    return {'wheat': stones}\n\n```the word```\n東京、京都。한국 é café",
)


@cache
def small_tokenizer(rule: str) -> Tokenizer:
    """Returns a byte-level BPE of 600 tokens with a rule of RULES; qwen's normalises by NFC."""
    tokenizer = Tokenizer(models.BPE())
    if rule == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = byte_level(RULES[rule])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _TEXTS * 4,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def byte_level(rule: str) -> pre_tokenizers.PreTokenizer:
    """Returns what splits by a regular expression and turns bytes into characters."""
    if not rule:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rule), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
