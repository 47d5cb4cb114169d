"""Remembers the token ids of pieces of long texts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from millrace.proxy.text.cuts import Pieces
from millrace.proxy.text.encoder_process import TokenArray

#: 32 MiB.
MOST_TOKENS = 1 << 23
_KEY_BYTES = 16

Key = bytes


def keys_of(pieces: Pieces, salt: str) -> list[Key]:
    """Returns a key for each piece. Who has another salt learns nothing of a piece by its time."""
    secret = blake2b(salt.encode()).digest() if salt else b""
    kind = b"special" if pieces.add_special_tokens else b""
    return [
        blake2b(text.encode(), digest_size=_KEY_BYTES, key=secret, person=kind).digest()
        for text in pieces.texts
    ]


class KnownPieces:
    """The pieces that were used last, of at most `most_tokens` together. Any thread may call.

    The ids lie in one block of memory, which is written round and round. In blocks of their own
    they would keep what was freed between them from going back to the system.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._room = np.empty(most_tokens, np.int32)  # takes memory as it is written
        self._written = 0  # tokens so far, with gaps at the end of the room
        self._lock = threading.Lock()
        #: When each piece was written, by `_written`, and its tokens; the oldest first.
        self._pieces: OrderedDict[Key, tuple[int, int]] = OrderedDict()

    def get(self, keys: Sequence[Key]) -> list[TokenArray | None]:
        """Returns the ids of each piece, int32 [tokens]; None where they are not known."""
        with self._lock:
            return [self._get(key) for key in keys]

    def add(self, keys: Sequence[Key], pieces: Sequence[TokenArray]) -> None:
        with self._lock:
            for key, ids in zip(keys, pieces, strict=True):
                if key not in self._pieces:
                    self._add(key, ids)

    def _get(self, key: Key) -> TokenArray | None:
        if (known := self._pieces.get(key)) is None:
            return None
        at, tokens = known
        start = at % self._room.size
        ids = self._room[start : start + tokens].copy()
        if self._written - at > self._room.size // 2:  # so that it is not written over soon
            del self._pieces[key]
            self._add(key, ids)
        return ids

    def _add(self, key: Key, ids: TokenArray) -> None:
        room = self._room.size
        if ids.size > room:
            return
        if self._written % room + ids.size > room:
            self._written += room - self._written % room
        at, start = self._written, self._written % room
        self._written += ids.size
        while self._pieces and next(iter(self._pieces.values()))[0] < self._written - room:
            self._pieces.popitem(last=False)
        self._room[start : start + ids.size] = ids
        self._pieces[key] = (at, ids.size)
