"""Lists the shards that a KVP worker holds, and whether the KV of each has landed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from millrace.core.incarnation import Incarnation
from millrace.core.kv.kvp_hold import HoldAsk
from millrace.core.token_events import FinishedPrefill
from millrace.telemetry.tracing.tracer import NO_SCOPE, Scope
from millrace.transfer.push.control import ReceiveCallbacks


@dataclass(slots=True, eq=False)
class HeldShard:
    """One shard, from the allocation of its pages until they are free again.

    `landed` is done when the shard's share of the prompt has landed; `lost` is done with the reason
    when the shard can't be held any longer; `ended`: the KV owner or this instance has released it.
    """

    ask: HoldAsk
    pages: list[int]
    number: int
    landed: asyncio.Future[None] = field(default_factory=lambda: _future())
    lost: asyncio.Future[str] = field(default_factory=lambda: _future())
    ended: bool = False
    scope: Scope = NO_SCOPE
    held_s: float = 0.0  # since the request's arrival

    def land(self) -> None:
        if not self.landed.done():
            self.landed.set_result(None)

    def lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)


class ShardTable:
    """The held shards by request id: at most one per request. For the event loop only."""

    def __init__(self) -> None:
        self._shards: dict[str, HeldShard] = {}
        self._emptied = asyncio.Event()

    def __len__(self) -> int:
        return len(self._shards)

    def __iter__(self) -> Iterator[HeldShard]:
        """Iterates over a copy; shards may leave meanwhile."""
        return iter(list(self._shards.values()))

    def get(self, request_id: str) -> HeldShard | None:
        return self._shards.get(request_id)

    def of(self, owner: Incarnation) -> list[HeldShard]:
        return [shard for shard in self if shard.ask.owner == owner]

    def add(self, shard: HeldShard) -> None:
        self._shards[shard.ask.request_id] = shard

    def remove(self, shard: HeldShard) -> None:
        """Removes a shard after everything that it held was freed."""
        del self._shards[shard.ask.request_id]
        self._emptied.set()

    def counts(self) -> tuple[int, int]:
        """Counts the shards whose share of the prompt has landed, and the others."""
        landed = sum(shard.landed.done() for shard in self._shards.values())
        return landed, len(self._shards) - landed

    async def wait_idle(self) -> None:
        """Returns when no shard is held."""
        while self._shards:
            self._emptied.clear()
            await self._emptied.wait()

    def beside(self, own: ReceiveCallbacks, on_corrupt: Callable[[str], None]) -> ReceiveCallbacks:
        """Returns receiver callbacks that handle shards here and pass all else to `own`."""

        def first_tokens(request_id: str, finished: FinishedPrefill) -> None:
            if request_id not in self._shards:  # a shard needs no first token
                own.on_first_tokens(request_id, finished)

        def landed(request_id: str) -> None:
            if (shard := self._shards.get(request_id)) is None:
                own.on_landed(request_id)
            else:
                shard.land()

        def prefix(request_id: str, attempt: int, tokens: int) -> None:
            if request_id not in self._shards:
                own.on_prefix(request_id, attempt, tokens)

        def failed(request_id: str, message: str, attempt: int, kept_tokens: int) -> None:
            if (shard := self._shards.get(request_id)) is None:
                own.on_failed(request_id, message, attempt, kept_tokens)
            else:
                shard.lose(message)

        return ReceiveCallbacks(
            on_first_tokens=first_tokens,
            on_landed=landed,
            on_prefix=prefix,
            on_failed=failed,
            on_corrupt=on_corrupt,
        )


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _ignore(*_: Any) -> None:  # noqa: ANN401 - any callback's
    """Ignores a callback about a request that is no longer held."""


#: The callbacks of a receiver that receives the KV of shards only.
NOBODY = ReceiveCallbacks(
    on_first_tokens=_ignore, on_landed=_ignore, on_prefix=_ignore, on_failed=_ignore
)
