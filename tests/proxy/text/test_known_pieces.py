"""The ids of pieces that were used last are remembered."""

from __future__ import annotations

import numpy as np

from millrace.proxy.text.cuts import Pieces
from millrace.proxy.text.known_pieces import KnownPieces, keys_of


def arrays(*sizes: int) -> list[np.ndarray]:
    return [np.arange(size, dtype=np.int32) for size in sizes]


def shown(known: KnownPieces, keys: list[bytes]) -> list[int | None]:
    return [None if ids is None else ids.size for ids in known.get(keys)]


def test_keys_tell_texts_kinds_and_salts_apart():
    texts = ["a", "b", "東京"]
    keys = [
        key
        for special in (False, True)
        for salt in ("", "one", "two")
        for key in keys_of(Pieces(texts, special), salt)
    ]
    assert len(set(keys)) == len(keys) == 18
    assert keys_of(Pieces(["b"], False), "one") == [keys[4]]


def test_the_pieces_used_last_stay():
    known, keys = KnownPieces(most_tokens=10), [b"a", b"b", b"c", b"d"]
    known.add(keys[:3], arrays(4, 3, 3))
    assert shown(known, keys) == [4, 3, 3, None]
    known.get(keys[:1])
    known.add(keys[3:], arrays(2))
    assert shown(known, keys) == [4, None, 3, 2]
    known.add(keys[:1], arrays(4))  # known already
    assert shown(known, keys) == [4, None, 3, 2]


def test_a_piece_that_is_longer_than_the_room_is_not_kept():
    known = KnownPieces(most_tokens=10)
    known.add([b"a", b"b"], arrays(5, 11))
    assert shown(known, [b"a", b"b"]) == [None, None]
    known.add([b"a"], arrays(10))
    assert shown(known, [b"a"]) == [10]
