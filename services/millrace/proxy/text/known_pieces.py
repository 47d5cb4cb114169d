"""Remembers the token ids of pieces of long texts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

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
    """The pieces that were used last, of at most `most_tokens` together. Any thread may call."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._tokens = 0
        self._lock = threading.Lock()
        self._ids: OrderedDict[Key, TokenArray] = OrderedDict()

    def get(self, keys: Sequence[Key]) -> list[TokenArray | None]:
        """Returns the ids of each piece, int32 [tokens]; None where they are not known."""
        with self._lock:
            found = [self._ids.get(key) for key in keys]
            for key, ids in zip(keys, found, strict=True):
                if ids is not None:
                    self._ids.move_to_end(key)
        return found

    def add(self, keys: Sequence[Key], pieces: Sequence[TokenArray]) -> None:
        with self._lock:
            for key, ids in zip(keys, pieces, strict=True):
                if key not in self._ids:
                    self._ids[key] = ids
                    self._tokens += ids.size
            while self._tokens > self._most_tokens:
                self._tokens -= self._ids.popitem(last=False)[1].size
