"""The ids of pieces that were used last are remembered."""

from __future__ import annotations

import random

import numpy as np

from millrace.proxy.text.cuts import Pieces
from millrace.proxy.text.known_pieces import KnownPieces, keys_of


def arrays(*sizes: int) -> list[np.ndarray]:
    return [np.arange(size, dtype=np.int32) for size in sizes]


def shown(known: KnownPieces, keys: list[bytes]) -> list[int | None]:
    found = known.get(keys)
    assert all(ids is None or ids.tolist() == list(range(ids.size)) for ids in found)
    return [None if ids is None else ids.size for ids in found]


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
    known, keys = KnownPieces(most_tokens=40), [b"a", b"b", b"c", b"d", b"e"]
    known.add(keys[:4], arrays(10, 10, 10, 10))
    known.get(keys[:1])
    known.add(keys[:1], arrays(10))  # known already
    known.add(keys[4:], arrays(10))
    assert shown(known, keys) == [10, None, 10, 10, 10]


def test_a_piece_that_is_longer_than_the_room_is_not_kept():
    known = KnownPieces(most_tokens=10)
    known.add([b"a", b"b"], arrays(5, 11))
    assert shown(known, [b"a", b"b"]) == [5, None]
    known.add([b"b"], arrays(10))
    assert shown(known, [b"a", b"b"]) == [None, 10]


def test_pieces_are_never_torn():
    """Whatever is written over, what is found is whole."""
    rng, known, sizes = random.Random(7), KnownPieces(most_tokens=50), {}
    hits = 0
    for _ in range(5000):
        name = str(rng.randrange(30)).encode()
        size = sizes.setdefault(name, rng.randrange(1, 15))
        found = known.get([name])[0]
        if found is None:
            known.add([name], [np.full(size, int(name), dtype=np.int32)])
        else:
            assert found.tolist() == [int(name)] * size
            hits += 1
    assert hits > 500
