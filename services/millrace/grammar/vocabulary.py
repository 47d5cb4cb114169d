"""The texts of one model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path

from llguidance import LLTokenizer

from millrace.grammar.source import GrammarError


class Vocabulary:
    """Reads the tokenizer of `folder` at the first use, which takes about a second.

    `size` counts the model's logits, `eos_ids` end a sequence. All methods raise GrammarError if
    the tokenizer can't be read.
    """

    def __init__(self, folder: Path, size: int, eos_ids: Sequence[int]) -> None:
        self._path = folder / "tokenizer.json"
        self.size = size
        self._eos_ids = list(eos_ids)
        self.token = cache(self._token)
        self.ids = cache(self._ids)
        self.with_prefix = cache(self._with_prefix)
        self.with_part = cache(self._with_part)

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        if not self._eos_ids:
            raise GrammarError("the model has no end-of-sequence token")
        try:
            return LLTokenizer(
                str(self._path),
                n_vocab=self.size,
                eos_token=self._eos_ids,
                slices=LLTokenizer.json_slices(),
            )
        except Exception as error:  # the library raises what its Rust code raises
            raise GrammarError(f"the model's tokenizer can't be constrained: {error}") from error

    def _token(self, token_id: int) -> bytes:
        """Returns the bytes of a token; of a special token, its name."""
        return self.tokenizer.decode_bytes([token_id])

    def _ids(self, text: str) -> tuple[int, ...]:
        """Returns tokens whose bytes are exactly those of `text`, as the model would write it."""
        wanted = text.encode()
        ids = self.tokenizer.tokenize_str(text, parse_special=True)
        if self.tokenizer.decode_bytes(ids) != wanted:
            ids = self.tokenizer.greedy_tokenize(text)
        if self.tokenizer.decode_bytes(ids) != wanted:
            raise GrammarError(f"the model's tokenizer can't write {text!r}")
        return tuple(ids)

    def _with_prefix(self, prefix: bytes) -> tuple[int, ...]:
        """Returns the tokens that begin with `prefix`."""
        return tuple(i for i, text in enumerate(self._tokens) if text.startswith(prefix))

    def _with_part(self, part: bytes) -> tuple[int, ...]:
        """Returns the tokens that contain `part`."""
        return tuple(i for i, text in enumerate(self._tokens) if part in text)

    @cached_property
    def _tokens(self) -> list[bytes]:
        return [self.tokenizer.decode_bytes([token_id]) for token_id in range(self.size)]
