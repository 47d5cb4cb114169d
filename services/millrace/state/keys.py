"""Names of a request's keys in Redis, and the bytes of its journal.

The braces put a request's keys into one hash slot, so that a script may use them together on any
kind of server.

A journal is a sequence of frames, each of little-endian int32: the choice's number, the number of
ids, the ids. One key holds all choices: every key of a request is known from its id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ID_DTYPE = np.dtype("<i4")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKeys:
    """The three keys of one request. Record: a hash. Prompt and journal: strings of int32."""

    record: bytes
    prompt: bytes
    journal: bytes


def request_keys(prefix: str, request_id: str) -> RequestKeys:
    stem = f"{prefix}:request:{{{request_id}}}".encode("utf-8", "surrogatepass")
    return RequestKeys(record=stem, prompt=stem + b":prompt", journal=stem + b":journal")


def journal_frame(choice: int, token_ids: Sequence[int]) -> bytes:
    return np.array([choice, len(token_ids), *token_ids], dtype=ID_DTYPE).tobytes()


def journal_tokens(journal: bytes, choice: int) -> npt.NDArray[np.int32]:
    """Returns the ids of `choice` in `journal`, in order; int32 [tokens]."""
    numbers = np.frombuffer(journal, dtype=ID_DTYPE)
    found = [np.empty(0, dtype=np.int32)]
    position = 0
    while position < numbers.size:
        start = position + 2
        position = start + int(numbers[start - 1])
        if numbers[start - 2] == choice:
            found.append(numbers[start:position].astype(np.int32))
    return np.concatenate(found)
