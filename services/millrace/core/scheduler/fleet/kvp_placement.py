"""Picks the instances that hold a long request's KV, where one instance may not or can not hold it.

KV Parallelism (Mnemosyne section 4.4; Medha section 3.3) as the scheduler sees it. `kv.kvp_shards`
makes the shards; this module picks the instances. The KV owner is a decode instance, which samples
the request's tokens and holds the first shard. The other shards go to KVP workers, and to decode
instances where those are too few. A request is spread when it may come to more than
`max_kv_tokens_per_worker`, or when no KV owner is large enough for it. A request that one instance
could hold waits for that instance instead.

The limit gives way to the request: where the instances that are there could not hold it, its shards
are as long as they have to be. So a lost KVP worker costs the answers of a batch some time, and no
request its place.

The memory for the prompt and the whole answer is reserved at all instances or at none, so two
requests never wait for each other. A waiting request reserves the instances that would hold it once
they are empty. They empty, since other requests pass them by."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from millrace.core.config import SchedulerConfig
from millrace.core.kv.kvp_shards import Reservation, reserve, shard_tokens
from millrace.core.live_request import LiveRequest
from millrace.core.request import Shard
from millrace.core.scheduler.fleet.instances import DecodeInstance, KvInstance, KvpInstance

#: Tokens of one request at one instance where no setting limits them.
_NO_LIMIT = 1 << 62


class _Room(NamedTuple):
    """An instance for `reserve`: with its free pages as they are, or as if it were empty."""

    id: str
    page_tokens: int
    free_pages: int


class KvpPlacement:
    """Spreads requests over one pool's instances that take new work."""

    def __init__(
        self,
        config: SchedulerConfig,
        decode: Mapping[str, DecodeInstance],
        kvp: Mapping[str, KvpInstance],
    ) -> None:
        self._most = config.max_kv_tokens_per_worker or _NO_LIMIT
        self._max_workers = config.max_kvp_degree or None
        self._decode = decode
        self._kvp = kvp

    def wanted(self, request: LiveRequest, owners: Iterable[DecodeInstance]) -> bool:
        """Returns whether no KV owner may, or could, hold all of the request.

        Choices are never spread.
        """
        if request.choices > 1:
            return False
        holders = len(self._decode) + len(self._kvp)
        may_spread = holders > 1 and self._max_workers != 1
        if may_spread and self._most < request.prompt_tokens + request.max_new_tokens:
            return True
        return not any(owner.is_large_enough(request) for owner in owners)

    def is_large_enough(self, request: LiveRequest, owners: Collection[DecodeInstance]) -> bool:
        """Whether the request fits once all have left, its own earlier attempts included."""
        return self._reserved(request, owners, None, _NO_LIMIT, empty=True) is not None

    def could_hold(self, request: LiveRequest, owners: Collection[DecodeInstance]) -> bool:
        """Whether the request fits once others left, and no earlier attempt is in the way."""
        most = self._limit(request, owners)
        return self._reserved(request, owners, (), most, empty=True) is not None

    def kept(
        self, request: LiveRequest, owners: Collection[DecodeInstance], reserved: Collection[str]
    ) -> tuple[str, ...]:
        """Returns the instances that would hold the request once empty; none are `reserved`."""
        most = self._limit(request, owners)
        found = self._reserved(request, owners, reserved, most, empty=True)
        return () if found is None else found.worker_ids

    def find(
        self, request: LiveRequest, owners: Collection[DecodeInstance], reserved: Collection[str]
    ) -> tuple[Shard, ...]:
        """Returns shards that fit now, at instances that are not `reserved`; () where they do not
        fit.
        """
        most = self._limit(request, owners)
        found = self._reserved(request, owners, reserved, most, empty=False)
        return () if found is None else found.shards

    def longest_shard(self, request: LiveRequest, owners: Collection[DecodeInstance]) -> int:
        """Returns the tokens of the longest first shard at an empty KV owner."""
        most = self._limit(request, owners)
        rooms = [self._room(one, empty=True) for one in owners]
        return max((_shard_tokens(room, most) for room in rooms), default=0)

    def most_tokens(self) -> int:
        """The tokens of the longest request that could be spread over the pool, were it empty."""
        if not self._decode:
            return 0
        holders = self._holders()
        most = sorted((one.card.kv_pages * one.page_tokens for one in holders), reverse=True)
        return sum(most[: self._max_workers])

    def _holders(self) -> list[KvInstance]:
        return [*self._decode.values(), *self._kvp.values()]

    def _limit(self, request: LiveRequest, owners: Collection[DecodeInstance]) -> int:
        """Returns the most tokens of the request at one instance: the setting, or the least number
        above it with which the request fits once all have left.
        """
        if self._most == _NO_LIMIT:
            return _NO_LIMIT

        def fits(most: int) -> bool:
            return self._reserved(request, owners, None, most, empty=True) is not None

        if fits(self._most):
            return self._most
        unit = max(one.page_tokens for one in self._holders())
        longer = range(self._most, request.prompt_tokens + request.max_new_tokens + unit, unit)
        place = bisect_left(longer, x=True, key=fits)
        return longer[place] if place < len(longer) else self._most

    def _reserved(
        self,
        request: LiveRequest,
        owners: Iterable[DecodeInstance],
        reserved: Collection[str] | None,
        most: int,
        *,
        empty: bool,
    ) -> Reservation | None:
        """Returns shards of at most `most` tokens at KVP workers alone, if they fit; else also at
        decode instances. With None as `reserved` all instances count.

        The KV owner is the instance that can take the longest shard, so that there is no shorter
        spread; the freest among equals.
        """
        owner = self._owner(request, owners, reserved, most, empty=empty)
        if owner is None:
            return None
        tokens = request.prompt_tokens + request.max_new_tokens
        found = None
        others = [
            one
            for one in self._decode.values()
            if one is not owner and (empty or self._keeps_pace(one, request, most))
        ]
        rooms = [self._room(owner, empty=empty)]
        more: Iterable[KvInstance]
        for more in (self._kvp.values(), others):
            rooms += [
                self._room(one, empty=empty) for one in more if _is_open(one, request, reserved)
            ]
            longest = max(most, *(room.page_tokens for room in rooms))
            found = reserve(tokens, rooms, longest, owner=owner.id, max_workers=self._max_workers)
            if found is not None:
                break
        return found

    def _owner(
        self,
        request: LiveRequest,
        owners: Iterable[DecodeInstance],
        reserved: Collection[str] | None,
        most: int,
        *,
        empty: bool,
    ) -> DecodeInstance | None:
        able = (
            one
            for one in owners
            if one.could_run(request)
            and _is_open(one, request, reserved)
            and (empty or self._keeps_pace(one, request, most, request.choices, request.pace_s))
        )
        return min(
            able,
            key=lambda one: (
                -_shard_tokens(self._room(one, empty=empty), most),
                -one.freeness,
                one.id,
            ),
            default=None,
        )

    def _keeps_pace(
        self,
        one: DecodeInstance,
        request: LiveRequest,
        most: int,
        sequences: int = 0,
        tbt_s: float = math.inf,
    ) -> bool:
        """Returns whether the pace holds with the longest shard that fits.

        A KV owner also gets the sequence.
        """
        tokens = request.prompt_tokens + request.max_new_tokens
        shard = min(_shard_tokens(self._room(one, empty=False), most), tokens)
        return one.keeps_pace(shard, sequences, tbt_s)

    @staticmethod
    def _room(one: KvInstance, *, empty: bool) -> _Room:
        return _Room(one.id, one.page_tokens, one.card.kv_pages if empty else one.open_pages)


def _shard_tokens(room: _Room, most: int) -> int:
    return shard_tokens(room, max(most, room.page_tokens))


def _is_open(one: KvInstance, request: LiveRequest, reserved: Collection[str] | None) -> bool:
    """Returns whether no waiting request has reserved it, and no earlier attempt is still there.
    With None as `reserved` all instances count.
    """
    return reserved is None or not (one.id in reserved or request.id in one.holdings)
