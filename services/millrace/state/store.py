"""The request store: the data of a request that every service may read.

A request's record, its prompt ids and the journal of its emitted tokens have one lifetime: all
three have the same deadline at any time, and a deleted or expired request never comes back.
Request ids are printable ASCII without spaces and braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from millrace.core.errors import MillraceError

_REQUEST_ID = re.compile(r"[!-z|~]{1,128}")  # printable ASCII without space, { and }

#: How long a request lives that its proxy does not renew, and that no other may continue: nobody
#: needs its record, and its id is free again.
LEASE_S = 60.0


class StoreError(MillraceError):
    """The store can't be reached, or does not have the requested data."""


class IdTaken(StoreError):
    """The store has a request of this id already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUpdate:
    """A request's new state (a value of core.request.RequestState), and its decode instance.

    An empty `decode_id` keeps the recorded one. The KV of the first `kv_tokens` tokens lies there.
    """

    request_id: str
    state: str
    decode_id: str = ""
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """Tokens that choice number `choice` of a request emitted, in order.

    They follow the first `start` tokens of the choice. Tokens that a journal has are not appended
    again, so a writer may repeat an entry.
    """

    request_id: str
    choice: int
    start: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPart:
    """Tokens of a journal, int32 [tokens], and the place where the next read begins. No tokens and
    place 0: the journal was lost and written again.
    """

    token_ids: npt.NDArray[np.int32]
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request's record. `spec` is opaque here (the wire's RequestSpec, serialised)."""

    request_id: str
    state: str
    decode_id: str
    spec: bytes
    prompt_tokens: int
    kv_tokens: int = 0  # first tokens whose KV is at `decode_id`


class RequestStore(Protocol):
    """Requests by id. Every method raises StoreError when the store can't be reached."""

    async def create(
        self,
        request_id: str,
        *,
        spec: bytes,
        prompt_ids: npt.NDArray[np.int32],
        kept: bool = False,
    ) -> None:
        """Records a request in state "queued" with its prompt ids (int32 [tokens], not empty).

        It lives for LEASE_S, unless it is renewed. `kept`: another request may continue it, so
        `finish` leaves its prompt until `release`. A kept request takes the place of an
        earlier one: the stream that needed that one is gone.

        Raises IdTaken, or StoreError when the id is malformed or when there are no prompt ids.
        """

    async def prompt_ids(
        self, request_id: str, start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.int32]:
        """Returns the prompt's ids [start, stop), with stop None to the end; int32 [tokens],
        writable.

        Reads only that slice. Raises StoreError when the request is unknown or finished, or the
        prompt is shorter than `stop` (or not longer than `start`, without a stop).
        """

    async def prompt_slices(
        self, request_id: str, slices: Sequence[tuple[int, int]]
    ) -> list[npt.NDArray[np.int32]]:
        """Returns the prompt's ids of each [start, stop), in one round trip; otherwise as
        `prompt_ids`.
        """

    async def renew(self, request_ids: Sequence[str]) -> None:
        """Lets these requests live for LEASE_S from now on, kept ones for `ttl_s`, in one round
        trip. Does nothing to deleted and finished ones.
        """

    async def set_states(self, updates: Sequence[StateUpdate]) -> None:
        """Sets states in one round trip. Deleted and finished requests stay as they are."""

    async def append_tokens(self, entries: Sequence[JournalEntry]) -> None:
        """Appends to journals in one round trip. Deleted requests stay deleted.

        After a StoreError it is unknown which entries were appended: append them all again.
        """

    async def journal(self, request_id: str, choice: int) -> npt.NDArray[np.int32]:
        """Returns the tokens journalled for a choice, int32 [tokens]; empty when there are none.

        It ends before the first token that its writer has lost.
        """

    async def journal_after(
        self, request_id: str, choice: int, *, known: int, place: int
    ) -> JournalPart:
        """Returns the tokens after the first `known` tokens; reads from `place` on.

        `place` is 0, or comes from the read that found the last of the `known` tokens. A read at
        another place finds nothing, and the next one begins at 0.
        """

    async def get(self, request_id: str) -> RequestRecord | None:
        """Returns the request's record, or None when it is deleted or expired."""

    async def finish(self, states: Mapping[str, str]) -> None:
        """Sets the final states of requests in one round trip, by id; removes their prompts and
        keeps the rest for `finished_ttl_s` more.

        The first final state stays. A `finished_ttl_s` of 0 deletes at once. A kept request keeps
        its prompt and its lifetime.
        """

    async def release(self, request_id: str) -> None:
        """Ends a kept request's stay: the rest of it lives on as after `finish`."""

    async def delete(self, request_id: str, *, spec: bytes | None = None) -> bool:
        """Removes all data of a request. With `spec`: only of the request that has this spec.

        Returns False when there is none.
        """

    async def ping(self) -> None:
        """Returns when the store answers."""

    async def close(self) -> None:
        """Closes the store's connections."""


def check_new_request(request_id: str, prompt_ids: npt.NDArray[np.int32]) -> bytes:
    """Checks the arguments of `create`; returns the ids as little-endian int32 bytes.

    Raises StoreError that names the wrong argument.
    """
    if _REQUEST_ID.fullmatch(request_id) is None:
        raise StoreError(
            f"request id {request_id!r}: it must be 1 to 128 printable ASCII characters "
            "other than space and braces"
        )
    if prompt_ids.ndim != 1 or prompt_ids.dtype != np.int32 or prompt_ids.size == 0:
        raise StoreError(
            f"request {request_id}: prompt ids are {prompt_ids.dtype}{list(prompt_ids.shape)}; "
            "they must be int32 of one dimension, at least one"
        )
    return prompt_ids.astype("<i4", copy=False).tobytes()


def check_slice(request_id: str, start: int, stop: int | None) -> None:
    """Raises StoreError when [start, stop) of a prompt can't hold an id."""
    if start < 0 or (stop is not None and stop <= start):
        raise StoreError(f"request {request_id}: no prompt ids in [{start}, {stop})")


def check_found(request_id: str, start: int, stop: int | None, found: int) -> None:
    """Raises StoreError when `found` ids are not all of the prompt's [start, stop)."""
    if found == 0 or (stop is not None and found != stop - start):
        wanted = f"[{start}, {'end' if stop is None else stop})"
        raise StoreError(f"request {request_id}: the store has {found} of the prompt ids {wanted}")
