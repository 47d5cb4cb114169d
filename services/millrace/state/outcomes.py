"""Keeps what became of the last requests of a fleet in Redis, for `millrace report`.

Outcomes and samples of the pools are opaque here. Each kind is a list: the newest at its end, and
the oldest removed when there are too many.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

from redis.asyncio import Redis

from millrace.core.config import StoreConfig
from millrace.state.leader import lease_name
from millrace.state.redis.keys import key_of
from millrace.state.redis.link import RedisLink, as_bytes
from millrace.state.redis.scripts import Script, ScriptCall

#: A fleet that is no more is forgotten after this time.
LIFETIME_S: Final = 31 * 86400
PAGE: Final = 5000

# ARGV: ms to live, the most entries, the entries.
_APPEND = Script("""
for i = 3, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[i]) end
redis.call('LTRIM', KEYS[1], -tonumber(ARGV[2]), -1)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
""")


class RedisOutcomes:
    """The lists of one fleet. Every method raises StoreError if the store is unreachable."""

    def __init__(self, config: StoreConfig, group: str) -> None:
        """`group`: `scheduler.group` of the fleet. Connects at the first call.

        Raises ConfigError when `config.url` is not valid.
        """
        self._link = RedisLink(config)
        self._prefix = config.key_prefix
        stem = config.key_prefix, lease_name(group)
        self._outcomes = key_of(*stem, "outcomes")
        self._samples = key_of(*stem, "samples")

    async def add_outcomes(self, outcomes: Sequence[bytes], most: int) -> None:
        """Appends outcomes, and keeps the last `most`. After an error they may be there or not."""
        await self._append(self._outcomes, outcomes, most)

    async def add_samples(self, samples: Sequence[bytes], most: int) -> None:
        """Appends samples of the pools, otherwise as `add_outcomes`."""
        await self._append(self._samples, samples, most)

    def outcomes(self) -> AsyncIterator[bytes]:
        """Yields all outcomes, the oldest first; not all if others are appended meanwhile to a full
        list.
        """
        return self._all(self._outcomes)

    def samples(self) -> AsyncIterator[bytes]:
        """Yields all samples as `outcomes`."""
        return self._all(self._samples)

    async def groups(self) -> list[str]:
        """Returns the groups of all fleets that the store has outcomes of."""
        lease, end = key_of(self._prefix, lease_name("")), b":outcomes"
        found: set[str] = set()

        async def scan(client: Redis) -> None:
            async for key in client.scan_iter(match=lease + b"*" + end, count=1000):
                name = as_bytes(key).removeprefix(lease).removesuffix(end)
                found.add(name.removeprefix(b":").decode())

        await self._link.each(scan)
        return sorted(found)

    async def close(self) -> None:
        """Closes the store's connections."""
        await self._link.close()

    async def _append(self, key: bytes, entries: Sequence[bytes], most: int) -> None:
        if entries and most:
            arguments: list[bytes | int] = [LIFETIME_S * 1000, most, *entries[-most:]]
            await self._link.run_once(ScriptCall(_APPEND, [key], arguments))

    async def _all(self, key: bytes) -> AsyncIterator[bytes]:
        start = 0
        while found := await self._page(key, start):
            start += len(found)
            for entry in found:
                yield as_bytes(entry)

    async def _page(self, key: bytes, start: int) -> Sequence[bytes | str]:
        end = start + PAGE - 1
        return await self._link.again(key, lambda client: client.lrange(key, start, end))
