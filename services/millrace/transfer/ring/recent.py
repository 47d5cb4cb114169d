"""Remembers ended links for a while, to tell their late messages from early messages of new
links.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

#: Far more links than can end while a message about the first of them is in flight.
KEPT_KEYS = 8192


class Recent(Generic[K]):
    """A set of at most `most` keys that drops the oldest key first."""

    def __init__(self, most: int = KEPT_KEYS) -> None:
        self._most = most
        self._keys: dict[K, None] = {}  # in order of arrival

    def __contains__(self, key: K) -> bool:
        return key in self._keys

    def add(self, key: K) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._most:
            del self._keys[next(iter(self._keys))]
