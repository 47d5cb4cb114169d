"""Philox4x32-10, the counter-based generator behind sampling.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC '11), section
3.3 and table 2. A draw is a pure function of (seed, choice, output position): no state is carried
from step to step, so a token comes out the same whatever batch its sequence is in and whichever
process samples it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

ROUNDS: Final = 10
_MULTIPLIER_0: Final = np.uint64(0xD2511F53)
_MULTIPLIER_1: Final = np.uint64(0xCD9E8D57)
_WEYL: Final = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW_32: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)


def philox4x32(
    counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Returns four random 32-bit words per column.

    `counter` is [4, b] and `key` [2, b] or [2, 1], 32-bit words held in uint64; so is the result,
    [4, b].
    """
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _32) ^ c1 ^ key[0],
            product_1 & _LOW_32,
            (product_0 >> _32) ^ c3 ^ key[1],
            product_0 & _LOW_32,
        )
        key = (key + _WEYL) & _LOW_32
    return np.stack((c0, c1, c2, c3))


def uniforms(seed: int, choice: int, start: int, count: int) -> npt.NDArray[np.float64]:
    """Returns one number of 53 random bits in [0, 1) for each output position [start, start +
    count).

    `seed` is taken modulo 2**64; `choice` and positions are below 2**32. Returns float64 [count].
    """
    counter = np.zeros((4, count), dtype=np.uint64)
    counter[0] = np.arange(start, start + count, dtype=np.uint64)
    counter[1] = choice
    key = np.array([[seed & 0xFFFF_FFFF], [seed >> 32 & 0xFFFF_FFFF]], dtype=np.uint64)
    words = philox4x32(counter, key)
    bits = ((words[0] << _32) | words[1]) >> np.uint64(11)
    fractions: npt.NDArray[np.float64] = bits * 2.0**-53  # exact: bits are below 2**53
    return fractions
