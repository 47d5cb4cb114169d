"""Names of prompt prefixes, by which a scheduler and an instance see that two prompts begin alike.

A sequence is cut into blocks of `block_tokens`. A whole block's hash covers its tokens and, by
chaining, all tokens before them: equal hashes mean equal prefixes. Block i names the first (i + 1)
* block_tokens tokens. Hashes are the first 64 bits of BLAKE2b: of all blocks that a fleet holds
(2^22, say) two are alike by accident once in a million such fleets.

The chain begins at a root. It covers a salt, so that requests of different salts share nothing, and
the size of a block. The root need not cover the model: an instance holds KV of its own model alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeAlias

#: Token ids as int32, little-endian.
TokenBytes: TypeAlias = "bytes | bytearray | memoryview | array[int]"

_HASH_BYTES = 8
_TOKEN_BYTES = 4


def prefix_root(block_tokens: int, salt: str = "") -> int:
    """Returns the root that the first block is chained to; never 0, which stands for none."""
    text = f"{block_tokens} {salt}".encode()
    return int.from_bytes(blake2b(text, digest_size=_HASH_BYTES).digest(), "little") or 1


def block_hashes(token_ids: TokenBytes, block_tokens: int, parent: int) -> list[int]:
    """The hashes of the whole blocks of `token_ids`, which follow the block `parent` (or root).

    Tokens after the last whole block have none. A million tokens take about 20 ms.
    """
    view = memoryview(token_ids).cast("B")
    step = block_tokens * _TOKEN_BYTES
    chained = parent.to_bytes(_HASH_BYTES, "little")
    hashes: list[int] = []
    for at in range(0, len(view) - step + 1, step):
        block = blake2b(chained, digest_size=_HASH_BYTES)
        block.update(view[at : at + step])
        chained = block.digest()
        hashes.append(int.from_bytes(chained, "little"))
    return hashes


def reusable(hashes: Sequence[int], prompt_tokens: int, block_tokens: int) -> Sequence[int]:
    """Returns a prompt's blocks that may come from a cache: the last token is always computed."""
    return hashes[: (prompt_tokens - 1) // block_tokens]
