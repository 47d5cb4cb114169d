"""Names of keys in Redis, and the bytes of a request's journal.

The braces put a request's keys into one hash slot, so that a script may use them together on any
kind of server.

A journal is a sequence of frames, each of little-endian int32: the choice's number, the number of
the choice's tokens before the frame, the number of ids, the ids. One key holds all choices: every
key of a request is known from its id. A frame may repeat tokens of earlier frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ID_DTYPE = np.dtype("<i4")
_HEAD = 3  # numbers of a frame before its ids


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKeys:
    """The three keys of one request. Record: a hash. Prompt and journal: strings of int32."""

    record: bytes
    prompt: bytes
    journal: bytes


def key_of(*parts: str) -> bytes:
    """Returns the name of a key. Ids of clients may hold lone surrogates."""
    return ":".join(parts).encode("utf-8", "surrogatepass")


def request_keys(prefix: str, request_id: str) -> RequestKeys:
    stem = key_of(prefix, "request", f"{{{request_id}}}")
    return RequestKeys(record=stem, prompt=stem + b":prompt", journal=stem + b":journal")


def journal_frame(choice: int, start: int, token_ids: Sequence[int]) -> bytes:
    return np.array([choice, start, len(token_ids), *token_ids], dtype=ID_DTYPE).tobytes()


def journal_tokens(journal: bytes, choice: int, known: int = 0) -> npt.NDArray[np.int32]:
    """Returns the ids of `choice` after its first `known` ids, in order; int32 [tokens].

    `journal` begins at a frame. The result ends where a frame is missing.
    """
    numbers = np.frombuffer(journal, dtype=ID_DTYPE)
    found = [np.empty(0, dtype=np.int32)]
    position = 0
    while position < numbers.size:
        of_choice, start, count = numbers[position : position + _HEAD].tolist()
        position += _HEAD + count
        if of_choice == choice and start <= known < start + count:
            found.append(numbers[position - (start + count - known) : position].astype(np.int32))
            known = start + count
    return np.concatenate(found)
