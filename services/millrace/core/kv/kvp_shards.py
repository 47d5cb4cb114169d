"""KV Parallelism: one long request's cache over several workers (Mnemosyne 4.4; Medha 3.3).

The cache is cut along the sequence. A worker holds one run of token positions, a shard, of at most
`max_kv_tokens_per_worker` tokens of a request. Every pass sends the query to all workers that hold
a shard, and merges their partial outputs. The first worker serves alone until its shard is full,
then the next worker joins ("onboarding"), and so on: an iteration reads a bounded number of keys at
each worker however long the context grows. A worker serves other requests before and beside it.

Symbols: C context tokens so far, M max_kv_tokens_per_worker; KVP degree(C) = ceil(C / M).

Deviations, each with its reason:

- The memory of the whole request, up to the last token it may emit, is reserved when it is
  admitted, all of it or none. The papers reserve as they grow, which deadlocks: two requests may
  each hold the memory that the other needs next.
- Shards end at page boundaries, so that two workers never share a page: M is rounded down to pages.
- A worker with fewer free pages than M takes a shorter shard. Without this rule a fleet that is
  half full refuses requests for which it has the memory. The degree may then exceed ceil(C / M).
- M gives way where the workers could not hold a request even if they were empty: `kvp_placement`
  calls with a larger M then. A lost worker would keep long requests out until it is back.
- The first shard may be tied to the request's KV owner (`owner`), which samples the tokens.

A reservation is for one sequence: requests with several choices are not spread. `kvp_placement` and
`decode_placement` decide which workers may take part, and which request waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import ConfigError
from millrace.core.request import Shard


class WorkerRoom(Protocol):
    """The fields of a worker that a reservation reads."""

    @property
    def id(self) -> str: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def free_pages(self) -> int:
        """Returns the pages that nothing holds and nothing has reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The shards of one request, its answer included, by position; the first starts at token 0."""

    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """Returns the reserved tokens: the context can't grow past them."""
        return self.shards[-1].end_token

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Returns the workers in the order in which they are onboarded."""
        return tuple(shard.worker_id for shard in self.shards)

    def worker_at(self, position: int) -> str:
        """Returns the worker that holds a token position.

        Raises ValueError outside the reservation.
        """
        if not 0 <= position < self.tokens:
            raise ValueError(f"position {position} is outside the {self.tokens} reserved tokens")
        starts = [shard.start_token for shard in self.shards]
        return self.shards[bisect_right(starts, position) - 1].worker_id

    def degree(self, context_tokens: int) -> int:
        """Returns how many workers take part in a pass over a context; at least 1."""
        return max(sum(shard.start_token < context_tokens for shard in self.shards), 1)

    def active(self, context_tokens: int) -> tuple[str, ...]:
        """Returns the workers that take part at a context length, in order of their onboarding."""
        return self.worker_ids[: self.degree(context_tokens)]

    def growth(self, start_token: int, end_token: int) -> tuple[Shard, ...]:
        """Returns which worker takes which of the new tokens [start_token, end_token).

        Raises ValueError past the reservation.
        """
        if not 0 <= start_token <= end_token <= self.tokens:
            raise ValueError(
                f"tokens [{start_token}, {end_token}) are outside the {self.tokens} reserved"
            )
        return tuple(
            Shard(
                worker_id=shard.worker_id,
                start_token=max(start_token, shard.start_token),
                end_token=min(end_token, shard.end_token),
            )
            for shard in self.shards
            if shard.start_token < end_token and start_token < shard.end_token
        )

    def onboarded(self, start_token: int, end_token: int) -> tuple[str, ...]:
        """The workers that join as the context grows from `start_token` to `end_token` tokens.

        The worker that serves from token 0 on is never among them.
        """
        return tuple(
            shard.worker_id
            for shard in self.shards[1:]
            if start_token <= shard.start_token < end_token
        )


def degree(context_tokens: int, max_kv_tokens_per_worker: int) -> int:
    """Returns the KVP degree of a context whose shards are all full except the last; at least 1."""
    return max(ceil_div(context_tokens, max_kv_tokens_per_worker), 1)


def reserve(
    tokens: int,
    workers: Iterable[WorkerRoom],
    max_kv_tokens_per_worker: int,
    *,
    owner: str | None = None,
    max_workers: int | None = None,
) -> Reservation | None:
    """Returns shards for all `tokens` of a request, or None when they do not fit now.

    `owner` names the worker that takes the first shard, whatever room the others have; None is
    returned, too, when it has no free page. The others follow freest first, the least id among
    equals. If a reservation of at most `max_workers` shards exists, it is found: each worker gives
    as much as it may, and the workers that can give most come first.

    Raises ConfigError when `tokens` is less than 1, or a shard can't hold one page.
    """
    if tokens < 1:
        raise ConfigError(f"kvp: tokens is {tokens}; it must be at least 1")
    shards: list[Shard] = []
    start = 0
    for worker in _freest_first(workers, max_kv_tokens_per_worker, owner):
        room = shard_tokens(worker, max_kv_tokens_per_worker)
        if start == tokens or len(shards) == max_workers or not room:
            break
        end = min(start + room, tokens)
        shards.append(Shard(worker_id=worker.id, start_token=start, end_token=end))
        start = end
    complete = start == tokens and (owner is None or shards[0].worker_id == owner)
    return Reservation(shards=tuple(shards)) if complete else None


def shard_tokens(worker: WorkerRoom, max_kv_tokens_per_worker: int) -> int:
    """Returns the longest shard that a worker can take now, in tokens: a whole number of its pages.

    Raises ConfigError when max_kv_tokens_per_worker is less than one page.
    """
    most = max_kv_tokens_per_worker // worker.page_tokens
    if most < 1:
        raise ConfigError(
            f"kvp: max_kv_tokens_per_worker is {max_kv_tokens_per_worker}; it must be at least "
            f"{worker.page_tokens}, a page of {worker.id}"
        )
    return min(most, worker.free_pages) * worker.page_tokens


def _freest_first(
    workers: Iterable[WorkerRoom], max_kv_tokens_per_worker: int, owner: str | None
) -> list[WorkerRoom]:
    """Sorts `owner` first.

    Where page sizes differ, the longer shard counts before the free memory.
    """
    return sorted(
        workers,
        key=lambda worker: (
            worker.id != owner,
            -shard_tokens(worker, max_kv_tokens_per_worker),
            -worker.free_pages * worker.page_tokens,
            worker.id,
        ),
    )
