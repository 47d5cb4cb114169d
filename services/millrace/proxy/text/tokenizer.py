"""Turns text into token ids and back, with the model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import Tokenizer as RawTokenizer

from millrace.core.errors import ModelError
from millrace.proxy.model_card import ModelCard
from millrace.proxy.text.cuts import Cuts
from millrace.proxy.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from millrace.proxy.text.encoder_process import TokenArray, ids_of
from millrace.proxy.text.long_texts import LongTexts

#: Longer texts are tokenised beside the event loop: 8 KiB take about a millisecond.
INLINE_CHARACTERS = 8192
CONTEXT_TOKENS = 8


class Tokenizer:
    """One model's tokenizer.json. Raises ModelError if the file is missing or damaged."""

    def __init__(self, card: ModelCard) -> None:
        path = card.folder / "tokenizer.json"
        try:
            document = path.read_text(encoding="utf-8")
            self._raw = RawTokenizer.from_str(document)
            self._raw.no_padding()
            self._raw.no_truncation()
            self._raw.decode(self.encode("a b", add_special_tokens=True).tolist())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # bare Exception, or Rust's panics, which are none
            raise ModelError(f"can't read {path}: {error}") from error
        self.vocab_size = max(card.vocab_size, self._raw.get_vocab_size(with_added_tokens=True))
        self._special = frozenset(
            i for i, token in self._raw.get_added_tokens_decoder().items() if token.special
        )
        # A model has few sets of kept tokens: with tools, and without.
        self._hidden: dict[tuple[str, ...], frozenset[int]] = {}
        self._tables: dict[frozenset[int], list[bytes]] = {}
        self._bytes: list[bytes] | None = None
        parts = json.loads(document)
        if _is_byte_level(parts.get("decoder")):
            self._bytes = [self._byte_level(i) for i in range(self.vocab_size)]
            self._shown_bytes = [
                b"" if i in self._special else piece for i, piece in enumerate(self._bytes)
            ]
        self._long = LongTexts(self._raw, Cuts(self._raw, parts), path)

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenArray:
        """Returns int32 [tokens]. `add_special_tokens` runs tokenizer.json's post-processor."""
        return ids_of(self._raw, [text], add_special_tokens=add_special_tokens)[0]

    async def encode_async(
        self, text: str, *, add_special_tokens: bool, salt: str = ""
    ) -> TokenArray:
        """Works as `encode`, and does not block the event loop by a long text.

        Of a long text, only pieces are tokenised that no earlier one of this salt had.
        """
        if len(text) <= INLINE_CHARACTERS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await self._long.encode(text, add_special_tokens=add_special_tokens, salt=salt)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of a whole sequence."""
        return self._raw.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self,
        prompt_ids: TokenArray | None,
        *,
        skip_special_tokens: bool,
        kept: tuple[str, ...] = (),
    ) -> Detokenizer:
        """Returns a detokeniser for the tokens after `prompt_ids` (None: no prompt).

        `kept` are special tokens that are never skipped, because a parser reads them.
        """
        hidden = self._hidden_but(kept) if skip_special_tokens and kept else None
        if self._bytes is not None:
            if hidden is not None:
                return ByteDetokenizer(self._table_without(hidden))
            return ByteDetokenizer(self._shown_bytes if skip_special_tokens else self._bytes)
        context = [] if prompt_ids is None else prompt_ids[-CONTEXT_TOKENS:].tolist()
        decode = self._raw.decode
        if hidden is not None:
            return WindowDetokenizer(
                lambda ids: decode([i for i in ids if i not in hidden], skip_special_tokens=False),
                context,
            )
        return WindowDetokenizer(
            lambda ids: decode(ids, skip_special_tokens=skip_special_tokens), context
        )

    def _hidden_but(self, kept: tuple[str, ...]) -> frozenset[int] | None:
        """Returns the skipped ids if `kept` are shown; None if no special token is kept."""
        hidden = self._hidden.get(kept)
        if hidden is None:
            ids = (self._raw.token_to_id(token) for token in kept)
            hidden = self._hidden[kept] = self._special.difference(i for i in ids if i is not None)
        return None if hidden == self._special else hidden

    def _table_without(self, hidden: frozenset[int]) -> Sequence[bytes]:
        table = self._tables.get(hidden)
        if table is None:
            assert self._bytes is not None, "only byte-level tokenizers have tables"
            shown = (b"" if i in hidden else piece for i, piece in enumerate(self._bytes))
            table = self._tables[hidden] = list(shown)
        return table

    def token_bytes(self, token_id: int) -> bytes:
        """Returns a token's bytes as log probabilities show them; empty beyond the vocabulary."""
        if self._bytes is not None:
            return self._bytes[token_id]
        token = self._raw.id_to_token(token_id)
        if token is None:
            return b""
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def close(self) -> None:
        self._long.close()

    def _byte_level(self, token_id: int) -> bytes:
        token = self._raw.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:
            return token.encode()


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return [_is_byte_level(d) for d in decoder.get("decoders", [])] == [True]
    return decoder.get("type") == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """Returns byte-level BPE's alphabet: printable Latin-1 for itself, other bytes from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
