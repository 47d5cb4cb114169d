"""Tokenises long texts beside the event loop, and only what is new in them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from millrace.proxy.text.cuts import Cuts, Pieces
from millrace.proxy.text.encoder_process import EncoderProcess, TokenArray, ids_of
from millrace.proxy.text.known_pieces import Key, KnownPieces, keys_of

#: More new text is tokenised in a process: its ids would hold the interpreter's lock for 1.5 ms.
THREAD_CHARACTERS = 128 * 1024
#: What a process gets at a time, about 60 ms of work. Another text may come between.
GROUP_CHARACTERS = 128 * 1024
#: Groups that are tokenised at a time, by threads and by processes.
_AT_ONCE = 2

log = logging.getLogger(__name__)


class _Encode(Protocol):
    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[TokenArray]: ...


@dataclass(slots=True)
class _Work:
    """A text's pieces and their ids, as far as they are known."""

    pieces: Pieces
    keys: Sequence[Key]
    ids: list[TokenArray | None]

    @property
    def new_characters(self) -> int:
        pairs = zip(self.pieces.texts, self.ids, strict=True)
        return sum(len(text) for text, ids in pairs if ids is None)

    def groups(self) -> Iterator[list[int]]:
        """Yields the places of pieces that are not known, so many as are tokenised at a time."""
        group, characters = list[int](), 0
        for place, text in enumerate(self.pieces.texts):
            if self.ids[place] is not None:
                continue
            if group and characters + len(text) > GROUP_CHARACTERS:
                yield group
                group, characters = [], 0
            group.append(place)
            characters += len(text)
        if group:
            yield group

    def joined(self) -> TokenArray:
        first, last = self.pieces.around
        return np.concatenate([first, *(ids for ids in self.ids if ids is not None), last])


class LongTexts:
    """Cuts texts into pieces and tokenises those that are not known from earlier texts.

    So the next question about a document, or the next turn of a chat, costs what it adds.
    """

    def __init__(self, tokenizer: Tokenizer, cuts: Cuts, path: Path) -> None:
        """`path` is that of tokenizer.json."""
        self._raw = tokenizer
        self._cuts = cuts
        self._known = KnownPieces()
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tokenise")
        self._beside = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tokenise-beside")
        self._processes = [EncoderProcess(path) for _ in range(_AT_ONCE)]
        #: The processes that have nothing to do; the one used last comes first.
        self._free = self._processes.copy()

    async def encode(self, text: str, *, add_special_tokens: bool, salt: str) -> TokenArray:
        """Returns int32 [tokens]. Texts of different salts share no work."""
        run = asyncio.get_running_loop().run_in_executor
        work = await run(self._threads, self._look_up, text, add_special_tokens, salt)
        few = work.new_characters <= THREAD_CHARACTERS
        threads, encode = (
            (self._threads, self._encode_here) if few else (self._beside, self._encode_beside)
        )
        for places in work.groups():
            await run(threads, self._encode, work, places, encode)
        return work.joined()

    def close(self) -> None:
        for threads in (self._threads, self._beside):
            threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _look_up(self, text: str, add_special_tokens: bool, salt: str) -> _Work:
        pieces = self._cuts.pieces(text, add_special_tokens=add_special_tokens)
        keys = keys_of(pieces, salt)
        return _Work(pieces, keys, self._known.get(keys))

    def _encode(self, work: _Work, places: Sequence[int], encode: _Encode) -> None:
        texts = [work.pieces.texts[place] for place in places]
        found = encode(texts, add_special_tokens=work.pieces.add_special_tokens)
        for place, ids in zip(places, found, strict=True):
            work.ids[place] = ids
        self._known.add([work.keys[place] for place in places], found)

    def _encode_here(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[TokenArray]:
        return ids_of(self._raw, texts, add_special_tokens=add_special_tokens)

    def _encode_beside(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[TokenArray]:
        """Tokenises in a process; here if it dies. As many threads call as there are processes."""
        process = self._free.pop()
        try:
            return process.encode(texts, add_special_tokens=add_special_tokens)
        except OSError as error:
            log.warning("tokenises %d characters in the proxy: %s", sum(map(len, texts)), error)
            return self._encode_here(texts, add_special_tokens=add_special_tokens)
        finally:
            self._free.append(process)
