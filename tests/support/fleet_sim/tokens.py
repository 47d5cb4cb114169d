"""What the simulated model says: every token follows from the request and its position."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt


def token_of(name: str, position: int) -> int:
    """Returns token number `position` of the answer to request `name`."""
    return zlib.crc32(f"{name}:{position}".encode()) % 50_000


def prompt_of(name: str, tokens: int) -> npt.NDArray[np.int32]:
    """Returns a prompt, int32 [tokens]."""
    return np.arange(tokens, dtype=np.int32) + int(name.lstrip("cmplr-")) * 7


def lineage(request_id: str) -> str:
    """Returns the client's name for the request that a migration has renamed."""
    return request_id.partition(".")[0]


def check_prompt(request_id: str, ids: npt.NDArray[np.int32], resumed: int) -> None:
    """Raises AssertionError unless the prompt ends in the first `resumed` tokens of the answer."""
    name, own = lineage(request_id), ids.size - resumed
    answer = [token_of(name, position) for position in range(resumed)]
    assert ids[own:].tolist() == answer, (
        f"{request_id}: the prompt has other tokens than it emitted"
    )
    assert (ids[:own] == prompt_of(name, own)).all(), f"{request_id}: the prompt is another one"
