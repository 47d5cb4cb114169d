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

from millrace.state.store import JournalPart

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


def journal_part(journal: bytes, choice: int, *, known: int, place: int) -> JournalPart:
    """Reads a journal's bytes from `place` on. Returns the ids of `choice` after its first `known`
    ids, up to a missing frame, and the place of the frame that has the last one.

    That frame must be at a `place` that is not 0. If it is not, the journal was lost and written
    again: no ids, and place 0.
    """
    numbers = np.frombuffer(journal, dtype=ID_DTYPE)
    if place and not _ends_at(numbers[:_HEAD].tolist(), choice, known):
        return JournalPart(token_ids=np.empty(0, dtype=np.int32), place=0)
    found = [np.empty(0, dtype=np.int32)]
    position, last = 0, place
    while position < numbers.size:
        frame = position
        of_choice, start, count = numbers[frame : frame + _HEAD].tolist()
        position += _HEAD + count
        if of_choice == choice and start <= known < start + count:
            found.append(numbers[position - (start + count - known) : position].astype(np.int32))
            known, last = start + count, place + frame * ID_DTYPE.itemsize
    return JournalPart(token_ids=np.concatenate(found), place=last)


def _ends_at(head: list[int], choice: int, known: int) -> bool:
    return len(head) == _HEAD and (head[0], head[1] + head[2]) == (choice, known)
