"""Keeps leases in Redis, measured by the server's clock. Each change is one script."""

from __future__ import annotations

from collections.abc import Callable

from redis.asyncio import Redis

from millrace.core.config import StoreConfig
from millrace.state.leases import Lease
from millrace.state.redis.keys import key_of
from millrace.state.redis.link import RedisLink, as_bytes
from millrace.state.redis.scripts import NOW_MS, Script, ScriptCall

# A lease's fields: epoch, address, until (ms), note. The record has no expiry: epochs must grow.
# ARGV: the time in ms or '', ms to hold, address, an epoch that was seen.
_ACQUIRE = Script(
    NOW_MS
    + """
local now = tonumber(ARGV[1]) or now_ms()
local known = redis.call('HMGET', KEYS[1], 'epoch', 'until', 'note')
local ends = tonumber(known[2] or 0)
if ends > now then
  if ends > now + tonumber(ARGV[2]) then  -- the clock was set back: nobody waits longer than this
    redis.call('HSET', KEYS[1], 'until', string.format('%.0f', now + tonumber(ARGV[2])))
  end
  return {0, ''}
end
local last = math.max(tonumber(known[1]) or 0, tonumber(ARGV[4]))
local epoch = math.max(last - last % 1000 + 1000 + now % 1000, now)
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', epoch), 'address', ARGV[3],
  'until', string.format('%.0f', now + tonumber(ARGV[2])))
return {epoch, known[3] or ''}
"""
)
# ARGV: the time in ms or '', ms to hold, epoch, note; an empty note stays as it is.
_RENEW = Script(
    NOW_MS
    + """
local now = tonumber(ARGV[1]) or now_ms()
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], 'until', string.format('%.0f', now + tonumber(ARGV[2])))
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'note', ARGV[4]) end
return 1
"""
)
_FIELDS = ("epoch", "until", "address", "note")


class RedisLeases:
    """A LeaseStore over Redis."""

    def __init__(self, config: StoreConfig, *, clock: Callable[[], float] | None = None) -> None:
        """Connects at the first call. `clock` returns Unix seconds; None: the server's clock.

        Raises ConfigError when `config.url` is not valid.
        """
        self._link = RedisLink(config)
        self._prefix = config.key_prefix
        self._clock = clock

    async def acquire(
        self, name: str, *, address: str, ttl_s: float, seen: int = 0
    ) -> Lease | None:
        call = self._call(_ACQUIRE, name, _ms(ttl_s), address, seen)
        epoch, note = await self._link.run_once(call)
        if not epoch:
            return None
        return Lease(epoch=epoch, address=address, left_s=ttl_s, note=as_bytes(note))

    async def renew(self, name: str, *, epoch: int, ttl_s: float, note: bytes) -> bool:
        return bool(await self._link.run(self._call(_RENEW, name, _ms(ttl_s), epoch, note)))

    async def release(self, name: str, *, epoch: int, note: bytes = b"") -> None:
        await self._link.run(self._call(_RENEW, name, 0, epoch, note))

    async def read(self, name: str) -> Lease | None:
        """Runs no script, which only those may who may write the lease."""

        key = self._key(name)

        async def look(client: Redis) -> tuple[list[bytes | None], tuple[int, int]]:
            pipeline = client.pipeline(transaction=False)
            pipeline.hmget(key, _FIELDS)
            pipeline.time()
            fields, time = await pipeline.execute()
            return fields, time

        (epoch, until_ms, address, note), (seconds, microseconds) = await self._link.again(
            key, look
        )
        if epoch is None:
            return None
        now_s = seconds + microseconds / 1e6 if self._clock is None else self._clock()
        return Lease(
            epoch=int(epoch),
            address=as_bytes(address).decode(),
            left_s=int(as_bytes(until_ms)) / 1000 - now_s,
            note=as_bytes(note),
        )

    async def close(self) -> None:
        await self._link.close()

    def _call(self, script: Script, name: str, *arguments: bytes | str | int) -> ScriptCall:
        now = "" if self._clock is None else int(self._clock() * 1000)
        return ScriptCall(script, [self._key(name)], (now, *arguments))

    def _key(self, name: str) -> bytes:
        return key_of(self._prefix, "lease", name)


def _ms(seconds: float) -> int:
    return max(round(seconds * 1000), 1)
