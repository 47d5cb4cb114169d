"""Keeps the owners of resumable streams in Redis, shared by all replicas of the proxy.

Leases are measured by the server's clock. Every change is one script, so that of two replicas that
adopt a stream at once one gets it.
"""

from __future__ import annotations

from millrace.core.config import StoreConfig
from millrace.state.redis.keys import key_of
from millrace.state.redis.link import RedisLink, as_bytes
from millrace.state.redis.scripts import NOW_MS, Script, ScriptCall
from millrace.state.store import IdTaken
from millrace.state.streams import Hold, Lease, StreamRecord

# A stream's fields: tenant, source, body, fence; created, held and wanted, ms of the server's clock
# (the latter two: until then); `final` once it is final.
_NOW = (
    NOW_MS
    + """
local now = now_ms()
local function wanted_until(ms)
  local before = tonumber(redis.call('HGET', KEYS[1], 'wanted') or 0)
  local until_ms = math.max(before, now + tonumber(ms))
  redis.call('HSET', KEYS[1], 'wanted', until_ms)
  return until_ms
end
"""
)
_OWNED = """
local known = redis.call('HMGET', KEYS[1], 'fence', 'final', 'held')
if known[1] ~= ARGV[1] or known[2] then return 0 end
"""
_CREATE = Script(
    _NOW
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'tenant', ARGV[1], 'source', ARGV[2], 'body', ARGV[3],
  'created', now, 'held', now + ARGV[4], 'wanted', now + ARGV[5], 'fence', ARGV[7])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return 1
"""
)
_RENEW = Script(
    _NOW
    + "if redis.call('EXISTS', KEYS[1]) == 0 then return 3 end"
    + _OWNED
    + """
redis.call('HSET', KEYS[1], 'body', ARGV[2], 'held', now + ARGV[3])
if now < wanted_until(ARGV[4]) then return 2 end
return 1
"""
)
_WANT = Script(
    _NOW
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then wanted_until(ARGV[1]) end
return 1
"""
)
_ADOPT = Script(
    _NOW
    + _OWNED
    + """
if tonumber(known[3]) > now + ARGV[4] then return 0 end
redis.call('HSET', KEYS[1], 'fence', string.format('%.0f', ARGV[1] + 1), 'held', now + ARGV[2])
wanted_until(ARGV[3])
return 1
"""
)
_FINISH = Script(
    """
local known = redis.call('HMGET', KEYS[1], 'fence', 'final', 'body')
if known[1] ~= ARGV[1] then return 0 end
if known[2] then return known[3] == ARGV[2] and 1 or 0 end
redis.call('HSET', KEYS[1], 'body', ARGV[2], 'final', '1')
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""
)
_DELETE = Script(
    _OWNED
    + """
if redis.call('HGET', KEYS[1], 'source') ~= ARGV[2] then return 0 end
return redis.call('UNLINK', KEYS[1])
"""
)


class RedisStreams:
    """A StreamStore over Redis."""

    def __init__(self, config: StoreConfig) -> None:
        """Connects at the first call. Raises ConfigError when `config.url` is not valid."""
        self._link = RedisLink(config)
        self._prefix = config.key_prefix

    async def create(
        self,
        stream_id: str,
        *,
        tenant: str,
        source: bytes,
        body: bytes,
        lease: Lease,
        ttl_s: float,
        fence: int,
    ) -> None:
        arguments = (tenant, source, body, *_ms(lease), round(ttl_s * 1000), fence)
        call = ScriptCall(_CREATE, (self._key(stream_id),), arguments)
        if not await self._link.run_once(call):
            raise IdTaken(f"stream {stream_id} is in the store already")

    async def get(self, stream_id: str) -> StreamRecord | None:
        key = self._key(stream_id)
        fields = ("tenant", "source", "body", "fence", "final", "held", "created")
        tenant, source, body, fence, final, held, created = await self._link.again(
            key, lambda client: client.hmget(key, fields)
        )
        if tenant is None:
            return None
        left_s = age_s = 0.0
        if final is None:
            now_ms = await self._link.now_ms(key)
            left_s = (int(as_bytes(held)) - now_ms) / 1000
            if created is not None:  # else an earlier version of Millrace created it
                age_s = max(0, now_ms - int(as_bytes(created))) / 1000
        return StreamRecord(
            tenant=as_bytes(tenant).decode(),
            source=as_bytes(source),
            body=as_bytes(body),
            fence=int(as_bytes(fence)),
            final=final is not None,
            left_s=left_s,
            age_s=age_s,
        )

    async def renew(self, stream_id: str, fence: int, body: bytes, lease: Lease) -> Hold:
        return Hold(await self._run(_RENEW, stream_id, (fence, body, *_ms(lease))))

    async def want(self, stream_id: str, wanted_s: float) -> None:
        await self._run(_WANT, stream_id, (round(wanted_s * 1000),))

    async def adopt(self, stream_id: str, fence: int, lease: Lease, *, left_s: float = 0.0) -> bool:
        arguments = (fence, *_ms(lease), round(left_s * 1000))
        call = ScriptCall(_ADOPT, (self._key(stream_id),), arguments)
        return bool(await self._link.run_once(call))

    async def finish(self, stream_id: str, fence: int, body: bytes, ttl_s: float) -> bool:
        return bool(await self._run(_FINISH, stream_id, (fence, body, round(ttl_s * 1000))))

    async def delete(self, stream_id: str, fence: int, source: bytes) -> bool:
        return bool(await self._run(_DELETE, stream_id, (fence, source)))

    async def close(self) -> None:
        await self._link.close()

    async def _run(
        self, script: Script, stream_id: str, arguments: tuple[bytes | str | int, ...]
    ) -> int:
        call = ScriptCall(script, (self._key(stream_id),), arguments)
        return int(await self._link.run(call))

    def _key(self, stream_id: str) -> bytes:
        return key_of(self._prefix, "stream", f"{{{stream_id}}}")


def _ms(lease: Lease) -> tuple[int, int]:
    return round(lease.held_s * 1000), round(lease.wanted_s * 1000)
