"""Keeps the waterfalls of requests in Redis, for all replicas of the proxy.

A waterfall is opaque here. If its request has ended, it lives as long as the request's record; that
of a resumable stream's open request lives as long as the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.core.config import StoreConfig
from millrace.state.redis.keys import key_of
from millrace.state.redis.link import RedisLink, as_bytes
from millrace.state.redis.scripts import Script, ScriptCall

# ARGV: ms to live, the waterfall of each key. A script takes a quarter of the client's time of as
# many commands.
_PUT = Script("""
for number, key in ipairs(KEYS) do
    redis.call('SET', key, ARGV[number + 1], 'PX', ARGV[1])
end
return #KEYS
""")


class RedisWaterfalls:
    """A string per response. Every method raises StoreError if the store is unreachable."""

    def __init__(self, config: StoreConfig, kind: str, ttl_s: float) -> None:
        """Connects at the first call. `kind` is a part of the keys; the waterfalls live `ttl_s`.

        Raises ConfigError when `config.url` is not valid.
        """
        self._link = RedisLink(config)
        self._prefix = config.key_prefix
        self._kind = kind
        self._ttl_ms = round(ttl_s * 1000)

    async def put(self, waterfalls: Mapping[str, bytes]) -> None:
        """Writes waterfalls by response id, in one round trip to each server."""
        if not waterfalls or not self._ttl_ms:
            return
        by_key = {self._key(name): waterfall for name, waterfall in waterfalls.items()}
        calls = [
            ScriptCall(_PUT, keys, (self._ttl_ms, *(by_key[key] for key in keys)))
            for keys in self._link.for_scripts(list(by_key))
        ]
        await self._link.run_all(calls)

    async def find(self, response_ids: Sequence[str]) -> list[bytes | None]:
        """Returns the waterfall of each response, in one round trip to each server; None: there is
        none.
        """
        if not response_ids:
            return []
        keys = [self._key(name) for name in response_ids]
        found = await self._link.by_key(keys, lambda pipe, key: pipe.mget(key))
        return [None if one is None else as_bytes(one) for (one,) in found]

    async def remove(self, response_ids: Sequence[str]) -> None:
        """Removes waterfalls, in one round trip to each server."""
        if response_ids:
            keys = [self._key(name) for name in response_ids]
            await self._link.by_key(keys, lambda pipe, key: pipe.unlink(key))

    async def close(self) -> None:
        """Closes the store's connections."""
        await self._link.close()

    def _key(self, response_id: str) -> bytes:
        return key_of(self._prefix, self._kind, response_id)
