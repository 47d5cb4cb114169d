"""Keeps leases in Redis, measured by the server's clock. Each change is one script."""

from __future__ import annotations

from collections.abc import Callable

from millrace.core.config import StoreConfig
from millrace.state.leases import Lease
from millrace.state.redis.keys import key_of
from millrace.state.redis.link import RedisLink, as_bytes
from millrace.state.redis.scripts import NOW_MS, Script, ScriptCall

# A lease's fields: epoch, address, until (ms), note. The record has no expiry: epochs must grow.
# ARGV: the time in ms or '', ms to hold, address.
_ACQUIRE = Script(
    NOW_MS
    + """
local now = tonumber(ARGV[1]) or now_ms()
local known = redis.call('HMGET', KEYS[1], 'epoch', 'until', 'note')
if known[2] and tonumber(known[2]) > now then return {0, ''} end
local epoch = math.max((tonumber(known[1]) or 0) + 1, now)
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
# ARGV: the time in ms or ''.
_READ = Script(
    NOW_MS
    + """
local now = tonumber(ARGV[1]) or now_ms()
local known = redis.call('HMGET', KEYS[1], 'epoch', 'until', 'address', 'note')
if not known[1] then return {0, 0, '', ''} end
return {tonumber(known[1]), tonumber(known[2]) - now, known[3], known[4] or ''}
"""
)


class RedisLeases:
    """A LeaseStore over Redis."""

    def __init__(self, config: StoreConfig, *, clock: Callable[[], float] | None = None) -> None:
        """Connects at the first call. `clock` returns Unix seconds; None: the server's clock.

        Raises ConfigError when `config.url` is not valid.
        """
        self._link = RedisLink(config)
        self._prefix = config.key_prefix
        self._clock = clock

    async def acquire(self, name: str, *, address: str, ttl_s: float) -> Lease | None:
        epoch, note = await self._link.run_once(self._call(_ACQUIRE, name, _ms(ttl_s), address))
        if not epoch:
            return None
        return Lease(epoch=epoch, address=address, left_s=ttl_s, note=as_bytes(note))

    async def renew(self, name: str, *, epoch: int, ttl_s: float, note: bytes) -> bool:
        return bool(await self._link.run(self._call(_RENEW, name, _ms(ttl_s), epoch, note)))

    async def release(self, name: str, *, epoch: int, note: bytes = b"") -> None:
        await self._link.run(self._call(_RENEW, name, 0, epoch, note))

    async def read(self, name: str) -> Lease | None:
        epoch, left_ms, address, note = await self._link.run(self._call(_READ, name))
        if not epoch:
            return None
        return Lease(
            epoch=epoch,
            address=as_bytes(address).decode(),
            left_s=left_ms / 1000,
            note=as_bytes(note),
        )

    async def close(self) -> None:
        await self._link.close()

    def _call(self, script: Script, name: str, *arguments: bytes | str | int) -> ScriptCall:
        now = "" if self._clock is None else int(self._clock() * 1000)
        return ScriptCall(script, [key_of(self._prefix, "lease", name)], (now, *arguments))


def _ms(seconds: float) -> int:
    return max(round(seconds * 1000), 1)
